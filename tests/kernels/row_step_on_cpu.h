// kernels/step/row_step.cu on a CPU (see cuda_on_cpu.h): all blocks of the grid run at once.
#include "cuda_on_cpu.h"

#define prefetch(p) check_tensor(p, 16)  // it does nothing, but its addresses must be those of keys and values
#include "kernel.inc"
extern "C" void run(const void* layers, const void* head, const void* scale_of, const void* zero_of, const void* last_norm,
                    const void* x, void* result, void* words,
                    u32* state, const int* tables, const int* tiles, u64* stamps, const void* weights,
                    long weight_bytes, const void* cache, long cache_bytes, float eps, float head_eps, float last_eps,
                    float scale, int num_layers, int table_stride, int shared) {
    launch(weights, weight_bytes, cache, cache_bytes, WARPS + 1 + FILLERS, {BLOCKS, 1, 1}, BLOCKS, shared, [=] {
        row_step((const Layer*)layers, head, (const u16*)scale_of, (const unsigned char*)zero_of, last_norm, (const u16*)x, result,
                 (uint2*)words, state, tables, tiles,
                 stamps, eps, head_eps, last_eps, scale, num_layers, table_stride);
    });
    while (!stores.empty()) land_store(0);
}
