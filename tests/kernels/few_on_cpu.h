// kernels/lowbit/few_rows.cu on a CPU (see cuda_on_cpu.h).
#include "cuda_on_cpu.h"

#include "kernel.inc"
extern "C" void run(const char* W, long w_bytes, const u16* X, long x_bytes, void* Y, const float* table, const u16* bias,
                    const void* norm, const u16* residual, float eps, int K, int M, int tiles, int chunks, int panel,
                    int split, int blocks, int shared, const void* choice, const int* counts, const int* members, int slots,
                    int pitch_slot) {
    launch(W, w_bytes, X, x_bytes, WARPS + (HALF_SM_REGS ? 3 : 0), {split, blocks, slots}, split, shared, [=] {
        lowbit_few_rows(W, X, Y, table, bias, norm, residual, eps, K, M, K, tiles, chunks, panel, choice, counts,
                        members, pitch_slot);
    });
}
