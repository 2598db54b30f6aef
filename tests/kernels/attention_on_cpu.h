// What kernels/_cuda/row_attention.cu needs beside cuda_on_cpu.h: clusters of blocks that send to each other. What is sent
// lands only when the sender arrives at the cluster's barrier, so a missing wait reads NaN.
#include <cmath>
#include <map>

#define RANKS 8
#include "cuda_on_cpu.h"

#define INLINE static inline
struct float4 { float x, y, z, w; };
struct Sent { float* to; float value; };
static std::map<Fiber*, std::vector<Sent>> sent;
static std::map<Fiber*, long> arrived;
static long cluster_arrivals;
static u32 num_ranks;
static void copy_or_zero(void* to, const void* from, bool inside) { copy_or_zero(shared_address(to), from, inside); }
static void launch_dependents() {}
static void grid_wait() {}
static u16 load_late16(const void* p) { return *(const u16*)p; }
static u32 cluster_rank() { return current->rank; }
static void cluster_arrive() {
    for (auto& s : sent[current]) *s.to = s.value;
    sent[current].clear();
    cluster_arrivals++, arrived[current]++;
}
static void cluster_wait() {
    const long target = arrived[current] * blockDim.x * num_ranks;
    while (cluster_arrivals < target) swapcontext(&current->context, &scheduler);
}
static void store_rank(float* to, u32 rank, float value) {
    const long at = (char*)to - smem;
    if (rank >= num_ranks || at < 0 || at + 4 > smem_bytes) fail("sent to nowhere");
    float* there = (float*)(memory[rank] + at);
    if (num_ranks > 1) sent[current].push_back({there, value});
    else *there = value;
}
static float given[RANKS][128];
static float __shfl_xor_sync(u32, float v, int bit) {
    given[current->rank][current->x] = v;
    __syncwarp();
    const float other = given[current->rank][current->x ^ bit];
    __syncwarp();
    return other;
}
static float power2(float v) { return exp2f(v); }
static float root(float v) { return 1.f / sqrtf(v); }
static float widen(u32 h) { return wide(h); }

#include "kernel.inc"

extern "C" void run(const u16* qkv, u16* keys, u16* values, const int* tables, const int* tiles, const float* turns,
                    const void* q_norm, const void* k_norm, u16* out, long cache_bytes, float eps, float scale,
                    int table_stride, int groups, int window, int num_tiles, int ranks, int shared) {
    num_ranks = ranks;
    launch(
        keys, cache_bytes, values, cache_bytes, 4, {ranks, groups, num_tiles}, shared,
        [=] {
            row_attention(qkv, keys, values, tables, tiles, turns, q_norm, k_norm, out, eps, scale, table_stride, groups,
                          window);
        },
        ranks, [] { sent.clear(), arrived.clear(), cluster_arrivals = 0; });
}
