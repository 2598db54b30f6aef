// kernels/sparse24_linear.cu on a CPU (see cuda_on_cpu.h).
#include "cuda_on_cpu.h"

#include "kernel.inc"
extern "C" void run(const char* W, long w_bytes, const u16* X, long x_bytes, u16* Y, int N, int K, int M, int tiles,
                    int chunks, int blocks, int shared) {
    launch(W, w_bytes, X, x_bytes, WARPS, {SPLIT, blocks, 1}, SPLIT, shared,
           [=] { sparse24_rows(W, X, Y, nullptr, N, K, M, K, tiles, chunks); });
}
