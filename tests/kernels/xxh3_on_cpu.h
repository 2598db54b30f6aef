// kernels/checksum/xxh3.cu on a CPU (see cuda_on_cpu.h).
#include "cuda_on_cpu.h"

#include "kernel.inc"
extern "C" void sum_chunk(const unsigned char* chunk, const u64* keys, u64* sums, u64* accumulators, int num_bytes) {
    const int num_blocks = (num_bytes - 1) / 1024;
    if (num_blocks)
        launch(chunk, 0, sums, 0, THREADS / 32, {(num_blocks * 8 + THREADS - 1) / THREADS, 1, 1}, 1, 0,
               [=] { block_sums((const u64*)chunk, keys, sums, num_blocks); });
    launch(chunk, 0, sums, 0, 1, {1, 1, 1}, 1, 0, [=] { accumulate(chunk, keys, sums, accumulators, num_bytes); });
}
