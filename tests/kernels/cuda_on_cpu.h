// Enough of CUDA to run what is in kernels/_cuda on a CPU (see cuda_on_cpu.py); headers of its kernels include this one. Every
// CUDA thread is a fiber; whatever a warp does together (mma, ldmatrix, barriers) is a meeting point, and between two of
// those the threads run in a random order, and warps at a different pace: what needs a barrier that is not there reads
// other bytes. An asynchronous copy lands at once or only when its thread waits for its group, by a coin: a missing wait
// reads old bytes, a missing barrier before the copy new ones. Addresses are checked against what the caller allocated.
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
struct uint4 { u32 x, y, z, w; };
struct uint2 { u32 x, y; };
struct Dim { int x, y, z; };
struct Grid {
    int x = 1, y = 1, z = 1;
    Grid(int blocks) : y(blocks) {}
    Grid(int x, int y, int z) : x(x), y(y), z(z) {}
};
#ifndef RANKS
#define RANKS 1  // blocks of a cluster, at most
#endif
#define __align__(n) alignas(n)
#define __grid_constant__
#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __maxnreg__(...)

struct Copy { u32 to; const char* from; bool zero; int bytes; };
struct Fiber {
    ucontext_t context;
    int x, rank;
    Dim block;
    bool done = false;
    std::vector<char> stack = std::vector<char>(128 * 1024);
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
};
static Fiber* current;
static ucontext_t scheduler;
static Dim blockDim, gridDim;
static char memory[RANKS][240 * 1024] __attribute__((aligned(1024)));  // of the blocks of a cluster
#define smem memory[current->rank]
#define blockIdx (current->block)
static u32 smem_bytes;
static const char *first[2], *last[2];  // the tensors that may be read asynchronously
#define threadIdx (*current)

static void fail(const char* what) {
    printf("block %d, thread %d: %s\n", current->block.x + current->block.y, current->x, what);
    exit(3);
}
static u32 draw(u32 below) {
    static u64 seed = 1;
    seed = seed * 6364136223846793005 + 1442695040888963407;
    return (seed >> 33) % below;
}
static long warp_arrivals[RANKS][64], block_arrivals[RANKS];
static long progress;  // meetings begun and threads ended, of all
static void meet(long& arrivals, int size) {
    progress++;
    const long target = (arrivals++ / size + 1) * size;
    while (arrivals < target) swapcontext(&current->context, &scheduler);
}
static void __syncwarp() { meet(warp_arrivals[current->rank][current->x / 32], 32); }
static void __syncthreads() { meet(block_arrivals[current->rank], blockDim.x); }

// ---- memory --------------------------------------------------------------------------------------------------
static u32 shared_address(const void* p) { return (const char*)p - smem; }
static void check_shared(u32 at) {
    if (at % 16 || at + 16 > smem_bytes) fail("16 bytes outside of shared memory, or across their boundary");
}
static void land(const Copy& c) {
    if (c.zero) memset(smem + c.to, 0, c.bytes);
    else memcpy(smem + c.to, c.from, c.bytes);
}
static void start_copy(u32 to, const void* from, bool zero) {
    const char* p = (const char*)from;
    check_shared(to);
    bool inside = false;
    for (int i = 0; i < 2; i++) inside = inside || (p >= first[i] && p + 16 <= last[i]);
    if (!inside || (size_t)p % 16) fail("a copy from outside of the tensors, or not aligned");
    const Copy copy = {to, p, zero, 16};
    if (draw(2)) land(copy);
    else current->open.push_back(copy);
}
static void copy_async(u32 to, const void* from) { start_copy(to, from, false); }
static void copy_or_zero(u32 to, const void* from, bool inside) { start_copy(to, from, !inside); }
static void copy_word_async(u32 to, const void* from) {
    if (to % 4 || (size_t)from % 4) fail("a copy that is not aligned");
    current->open.push_back({to, (const char*)from, false, 4});
}
static void commit() {
    current->groups.push_back(current->open);
    current->open.clear();
}
template <int n> static void wait_all_but() {
    static_assert(n >= 0, "cp.async.wait_group takes no negative number");
    auto& groups = current->groups;
    while ((int)groups.size() > n) {
        for (auto& c : groups[0]) land(c);
        groups.erase(groups.begin());
    }
}

// ---- arithmetic (bf16) ---------------------------------------------------------------------------------------
static float __uint_as_float(u32 u) { float f; memcpy(&f, &u, 4); return f; }
static float wide(u32 h) { return __uint_as_float(h << 16); }
static u16 narrow(float f) {
    u32 u;
    memcpy(&u, &f, 4);
    if (f != f) return 0x7fff;
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

// ---- what a warp does together: fragments as the PTX manual draws them -----------------------------------------
static u32 given_a[64][32][4], given_b[64][32][2], given_x[64][32];
static void mma(float* c, const u32* a, u32 b0, u32 b1) {
    const int warp = current->x / 32, lane = current->x % 32;
    memcpy(given_a[warp][lane], a, 16);
    given_b[warp][lane][0] = b0, given_b[warp][lane][1] = b1;
    __syncwarp();
    for (int e = 0; e < 4; e++) {
        const int row = lane / 4 + (e / 2) * 8, col = lane % 4 * 2 + e % 2;
        double sum = c[e];
        for (int k = 0; k < 16; k++) {
            const u32 av = given_a[warp][row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> k % 2 * 16;
            const u32 bv = given_b[warp][col * 4 + k % 8 / 2][k / 8] >> k % 2 * 16;
            sum += (double)wide(av & 0xffff) * wide(bv & 0xffff);
        }
        c[e] = sum;
    }
    __syncwarp();
}
static void load_x(u32* f, u32 address) {
    const int warp = current->x / 32, lane = current->x % 32;
    check_shared(address);
    given_x[warp][lane] = address;
    __syncwarp();
    for (int m = 0; m < 4; m++) memcpy(f + m, smem + given_x[warp][m * 8 + lane / 4] + lane % 4 * 4, 4);
    __syncwarp();
}

static std::function<void()> body;
static void enter() {
    body();
    current->done = true, progress++;
    swapcontext(&current->context, &scheduler);
}
// A grid (or a number) of blocks of `warps` warps; clusters of `ranks` blocks along x, one after the other. W and X are what
// may be read asynchronously; `fresh` resets what an emulation keeps for a cluster.
static void launch(const void* W, long w_bytes, const void* X, long x_bytes, int warps, Grid grid, int shared,
                   std::function<void()> kernel, int ranks = 1, std::function<void()> fresh = [] {}) {
    smem_bytes = shared;
    first[0] = (const char*)W, last[0] = first[0] + w_bytes, first[1] = (const char*)X, last[1] = first[1] + x_bytes;
    const int threads = warps * 32;
    blockDim = {threads, 1, 1}, gridDim = {grid.x, grid.y, grid.z};
    body = kernel;
    std::vector<Fiber> fibers;
    for (int cluster = 0; cluster < grid.x / ranks * grid.y * grid.z; cluster++) {
        const int x = cluster % (grid.x / ranks) * ranks, y = cluster / (grid.x / ranks) % grid.y;
        memset(memory, 0xff, sizeof memory);  // NaN
        memset(warp_arrivals, 0, sizeof warp_arrivals), memset(block_arrivals, 0, sizeof block_arrivals);
        fresh();
        fibers = std::vector<Fiber>(threads * ranks);
        std::vector<Fiber*> order;
        for (int i = 0; i < threads * ranks; i++) {
            Fiber& f = fibers[i];
            f.x = i % threads, f.rank = i / threads;
            f.block = {x + f.rank, y, cluster / (grid.x / ranks) / grid.y};
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
            makecontext(&f.context, enter, 0);
            order.push_back(&f);
        }
        u32 idle = 0;
        for (u32 round = 0; !order.empty(); round++) {
            const long before = progress;
            for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[draw(i)]);
            for (Fiber* f : order)
                if (round % (1 + (f->x / 32 + f->rank + cluster) % 3) == 0)  // warps run in every first to third round
                    current = f, swapcontext(&scheduler, &f->context);
            idle = progress == before ? idle + 1 : 0;
            if (idle > 1000) fail("all threads wait for ever");
            order.erase(std::remove_if(order.begin(), order.end(), [](Fiber* f) { return f->done; }), order.end());
        }
        for (int r = 0; r < ranks; r++)
            for (u32 i = shared; i < sizeof memory[r]; i++)
                if (memory[r][i] != (char)0xff) printf("shared memory was written behind its end\n"), exit(3);
    }
}

