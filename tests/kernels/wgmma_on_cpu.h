// What kernels/_cuda/lowbit_wgmma.cu needs beside cuda_on_cpu.h, as the PTX manual defines it: mbarriers, the copy engine
// with its 128-byte swizzle, wgmma with its second operand found through a descriptor, and clusters of SPLIT blocks.
#include <map>

#define RANKS SPLIT

#include "cuda_on_cpu.h"

struct float4 { float x, y, z, w; };

static u32 __float_as_uint(float f) { u32 u; memcpy(&u, &f, 4); return u; }
static float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static u32 twice(float f) { return narrow(f) * 0x10001u; }
static u32 cluster_rank() { return current->rank; }
static long arrived;
static std::map<Fiber*, long> awaited;  // arrivals in the cluster that a thread waits for
static void cluster_arrive() {
    const long size = RANKS * blockDim.x;
    if (awaited.count(current)) fail("arrives twice without a wait");
    awaited[current] = (arrived++ / size + 1) * size;
}
static void cluster_wait() {
    if (!awaited.count(current)) fail("waits without having arrived");
    while (arrived < awaited[current]) swapcontext(&current->context, &scheduler);
    awaited.erase(current);
}
static void store_to(u32 rank, u32 address, const float* v) {
    check_shared(address);
    memcpy(memory[rank] + address, v, 16);
}

#include "kernel.inc"

struct Barrier { int count, pending, bytes, phase; };
static std::map<u32, Barrier> all_barriers[RANKS];
#define barriers all_barriers[current->rank]
static Barrier& barrier(u32 at) {
    if (!barriers.count(at)) fail("a barrier that nobody set up");
    return barriers[at];
}
static void settle(Barrier& b) {
    if (b.pending == 0 && b.bytes == 0) b.phase ^= 1, b.pending = b.count;
}
static void bar_init(u32 at, u32 count) { barriers[at] = {(int)count, (int)count, 0, 0}; }
static void bar_init_done() {}
static void bar_arrive(u32 at) {
    Barrier& b = barrier(at);
    if (--b.pending < 0) fail("more arrivals than a barrier counts");
    settle(b);
}
static void bar_expect(u32 at, u32 bytes) {
    barrier(at).bytes += bytes;
    bar_arrive(at);
}
static bool bar_passed(u32 at, u32 parity) {
    if (barrier(at).phase != (int)parity) return true;
    swapcontext(&current->context, &scheduler);
    return barrier(at).phase != (int)parity;
}
static void load_box(u32 to, const TensorMap* map, int k, int m, u32 bar) {
    const u16* x = (const u16*)map->opaque[0];
    const long rows = map->opaque[1], width = map->opaque[2];
    if (to % 1024 || to + TN * 128 > smem_bytes) fail("a box that is not aligned, or outside of shared memory");
    for (int r = 0; r < TN; r++)
        for (int c = 0; c < 64; c++) {
            const u32 at = to + r * 128 + c * 2;
            *(u16*)(smem + (at ^ (at >> 7 & 7) << 4)) = m + r < rows && k + c < width ? x[(m + r) * width + k + c] : 0;
        }
    barrier(bar).bytes -= TN * 128;
    settle(barrier(bar));
}
static u32 all_given[RANKS][64][32];
#define given all_given[current->rank]
static u32 transpose8(u32 v) {
    const int warp = current->x / 32, lane = current->x % 32, row = lane / 4, col = lane % 4 * 2;
    given[warp][lane] = v;
    __syncwarp();
    const u32 low = given[warp][col * 4 + row / 2] >> row % 2 * 16, high = given[warp][col * 4 + 4 + row / 2] >> row % 2 * 16;
    __syncwarp();
    return (low & 0xffff) | high << 16;
}
static u32 from_neighbour(u32 v) {
    const int warp = current->x / 32, lane = current->x % 32;
    given[warp][lane] = v;
    __syncwarp();
    const u32 other = given[warp][lane ^ 1];
    __syncwarp();
    return other;
}
static long group_arrivals[RANKS][16];
static void wgmma_fence() {}
static void wgmma_commit() {}
static u32 all_group_a[RANKS][16][128][4];
#define group_a all_group_a[current->rank]
static void wgmma(float* c, const u32* a, u32 b) {
    const int group = current->x / 128, thread = current->x % 128, lane = thread % 32, warp = thread / 32;
    if (b >> 16 != 1) fail("another descriptor than this one emulates");
    memcpy(group_a[group][thread], a, 16);
    meet(group_arrivals[current->rank][group], 128);
    const u32 start = (b & 0x3fff) << 4, stride = 1024;
    for (int e = 0; e < TN / 2; e++) {
        const int row = lane / 4 + (e & 2 ? 8 : 0), n = e / 4 * 8 + lane % 4 * 2 + e % 2;
        double sum = c[e];
        for (int k = 0; k < 16; k++) {
            const u32 av = group_a[group][warp * 32 + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> k % 2 * 16;
            const u32 at = start + n / 8 * stride + n % 8 * 128 + k * 2;
            sum += (double)wide(av & 0xffff) * wide(*(u16*)(smem + (at ^ (at >> 7 & 7) << 4)));
        }
        c[e] = sum;
    }
    meet(group_arrivals[current->rank][group], 128);
}

static void wgmma_new(float* c, const u32* a, u32 b) {
    std::fill(c, c + TN / 2, 0.f);
    wgmma(c, a, b);
}

extern "C" void run_wide(const char* W, long w_bytes, const u16* X, u16* Y, const float* table, int N, int K, int M,
                         int tiles, int chunks, int blocks, int shared) {
    TensorMap map = {{(u64)X, (u64)M, (u64)K}};
    launch(
        W, w_bytes, nullptr, 0, CONSUMERS + 4, Grid(SPLIT, blocks, 1), shared,
        [=] { lowbit_wide(W, map, Y, table, nullptr, N, M, tiles, chunks); }, SPLIT,
        [] {
            memset(group_arrivals, 0, sizeof group_arrivals), arrived = 0, awaited.clear();
            for (auto& some : all_barriers) some.clear();
        });
}
