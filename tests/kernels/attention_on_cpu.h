// kernels/attention/decode_attention.cu on a CPU (see cuda_on_cpu.h).
#include "cuda_on_cpu.h"

#include "kernel.inc"
extern "C" void run(const u16* qkv, u16* keys, u16* values, const int* tables, const int* tiles, const float* turns,
                    const void* q_norm, const void* k_norm, u16* out, long cache_bytes, float eps, float scale,
                    int table_stride, int groups, int window, int num_tiles, int shared) {
    launch(keys, cache_bytes, values, cache_bytes, WARPS, {SPLIT, groups, num_tiles}, SPLIT, shared, [=] {
        decode_attention(qkv, keys, values, tables, tiles, turns, q_norm, k_norm, out, eps, scale, table_stride, groups, window);
    });
}
