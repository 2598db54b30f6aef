// Enough of CUDA to run kernels/_cuda/lowbit_wgmma.cu on a CPU, one block at a time (no clusters). Every CUDA thread is a
// fiber. Emulated as the PTX manual defines them: mbarriers, the copy engine with its 128-byte swizzle, and wgmma with
// its second operand found through a descriptor. An asynchronous copy of weights lands only when its thread waits.
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
struct uint4 { u32 x, y, z, w; };
struct uint2 { u32 x, y; };
struct float4 { float x, y, z, w; };
struct Dim { int x, y, z; };
#define __align__(n) alignas(n)
#define __grid_constant__
#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)

struct Copy { u32 to; const char* from; bool zero; };
struct Fiber {
    ucontext_t context;
    int x;
    bool done = false;
    std::vector<char> stack = std::vector<char>(128 * 1024);
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
};
static Fiber* current;
static ucontext_t scheduler;
static Dim blockIdx, blockDim, gridDim;
static char smem[240 * 1024] __attribute__((aligned(1024)));
static u32 smem_bytes;
static const char *first, *last;  // the weights, which are read asynchronously
#define threadIdx (*current)

static void fail(const char* what) {
    printf("thread %d: %s\n", current->x, what);
    exit(3);
}
static long warp_arrivals[64], block_arrivals;
static void meet(long& arrivals, int size) {
    const long target = (arrivals++ / size + 1) * size;
    while (arrivals < target) swapcontext(&current->context, &scheduler);
}
static void __syncwarp() { meet(warp_arrivals[current->x / 32], 32); }
static void __syncthreads() { meet(block_arrivals, blockDim.x); }

// ---- memory --------------------------------------------------------------------------------------------------
static u32 shared_address(const void* p) { return (const char*)p - smem; }
static void check_shared(u32 at) {
    if (at % 16 || at + 16 > smem_bytes) fail("16 bytes outside of shared memory, or across their boundary");
}
static void start_copy(u32 to, const void* from, bool zero) {
    const char* p = (const char*)from;
    check_shared(to);
    if (p < first || p + 16 > last || (size_t)p % 16) fail("a copy from outside of the weights, or not aligned");
    current->open.push_back({to, p, zero});
}
static void copy_async(u32 to, const void* from) { start_copy(to, from, false); }
static void copy_or_zero(u32 to, const void* from, bool inside) { start_copy(to, from, !inside); }
static void commit() {
    current->groups.push_back(current->open);
    current->open.clear();
}
template <int n> static void wait_all_but() {
    static_assert(n >= 0, "cp.async.wait_group takes no negative number");
    auto& groups = current->groups;
    while ((int)groups.size() > n) {
        for (auto& c : groups[0])
            if (c.zero) memset(smem + c.to, 0, 16);
            else memcpy(smem + c.to, c.from, 16);
        groups.erase(groups.begin());
    }
}

// ---- arithmetic (bf16) ---------------------------------------------------------------------------------------
static float __uint_as_float(u32 u) { float f; memcpy(&f, &u, 4); return f; }
static float wide(u32 h) { return __uint_as_float(h << 16); }
static u16 narrow(float f) {
    u32 u;
    memcpy(&u, &f, 4);
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
static float half_float(u32 h) {
    const int e = h >> 10 & 31, m = h & 1023;
    const float v = e ? __builtin_ldexpf(1024 + m, e - 25) : __builtin_ldexpf(m, -24);
    return h & 0x8000 ? -v : v;
}
static u32 __byte_perm(u32 a, u32 b, u32 select) {
    const u64 all = (u64)b << 32 | a;
    u32 r = 0;
    for (int i = 0; i < 4; i++) r |= (u32)(all >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
    return r;
}
static u32 __funnelshift_r(u32 low, u32 high, u32 by) { return ((u64)high << 32 | low) >> (by & 31); }
template <class F> static u32 pairwise(u32 a, u32 b, F f) {
    return narrow(f(wide(a & 0xffff), wide(b & 0xffff))) | (u32)narrow(f(wide(a >> 16), wide(b >> 16))) << 16;
}
static u32 sub2(u32 a, u32 b) { return pairwise(a, b, [](float x, float y) { return x - y; }); }
static u32 mul2(u32 a, u32 b) { return pairwise(a, b, [](float x, float y) { return x * y; }); }
static u32 mul_relu2(u32 a, u32 b) { return pairwise(a, b, [](float x, float y) { return max(x * y, 0.f); }); }
static u32 magic_register() { return 0x43004300; }
static u32 field(u32 w, u32 mask, u32 magic) { return (w & mask) | magic; }


#include "kernel.inc"

struct Barrier { int count, pending, bytes, phase; };
static std::map<u32, Barrier> barriers;
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
static u32 given[64][32];
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
static long group_arrivals[16], sums_arrivals;
static void sums_sync() { meet(sums_arrivals, CONSUMERS * 32); }
static void wgmma_fence() {}
static void wgmma_commit() {}
static u32 group_a[16][128][4];
static void wgmma(float* c, const u32* a, u64 b) {
    const int group = current->x / 128, thread = current->x % 128, lane = thread % 32, warp = thread / 32;
    if (b >> 62 != 1) fail("another swizzle than this one emulates");
    memcpy(group_a[group][thread], a, 16);
    meet(group_arrivals[group], 128);
    const u32 start = (b & 0x3fff) << 4, stride = (b >> 32 & 0x3fff) << 4;
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
    meet(group_arrivals[group], 128);
}

static std::function<void()> body;
static void enter() {
    body();
    current->done = true;
    swapcontext(&current->context, &scheduler);
}
extern "C" void run_wide(const char* W, long w_bytes, const u16* X, u16* Y, const float* table, int N, int K, int M,
                         int tiles, int chunks, int blocks, int shared) {
    const int threads = CONSUMERS * 32 + 128;
    smem_bytes = shared;
    first = W, last = W + w_bytes;
    blockDim = {threads, 1, 1};
    TensorMap map = {{(u64)X, (u64)M, (u64)K}};
    gridDim = {1, blocks, 1};
    for (int b = 0; b < blocks; b++) {
        blockIdx = {0, b, 0};
        memset(smem, 0xff, sizeof smem);  // NaN
        memset(warp_arrivals, 0, sizeof warp_arrivals);
        memset(group_arrivals, 0, sizeof group_arrivals);
        block_arrivals = sums_arrivals = 0;
        barriers.clear();
        body = [=] { lowbit_wide(W, map, Y, table, nullptr, N, M, tiles, chunks); };
        std::vector<Fiber> fibers(threads);
        for (int i = 0; i < threads; i++) {
            Fiber& f = fibers[i];
            f.x = i;
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
            makecontext(&f.context, enter, 0);
        }
        for (bool more = true; more;) {
            more = false;
            for (auto& f : fibers)
                if (!f.done) current = &f, more = true, swapcontext(&scheduler, &f.context);
        }
    }
}
