// What kernels/runtime/instructions.cu has, and enough of CUDA C++, for a CPU (see emulated.py); headers of the kernels
// include this one. Every CUDA thread is a fiber; whatever a warp does together (mma, ldmatrix, shuffles) and every
// barrier is a meeting point, and between two of those the threads run in a random order, and warps at a different pace:
// what needs a barrier that is not there reads other bytes. An asynchronous copy lands at once or only when its thread
// waits for its group, by a coin: a missing wait reads old bytes, a missing barrier before the copy new ones. What is sent
// to another block of a cluster lands when the sender arrives at the cluster's barrier. Addresses are checked against
// what the caller allocated.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#if HALF
#error "only bf16 is emulated"
#endif

using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
struct uint4 { u32 x, y, z, w; };
struct uint2 { u32 x, y; };
struct float4 { float x, y, z, w; };
struct float2 { float x, y; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
struct Dim { int x, y, z; };
#define RANKS 8  // blocks of a cluster, at most
#define WARPS_OF_A_BLOCK 64
#define INLINE inline
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static
#define __grid_constant__
#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __maxnreg__(...)

struct Copy { u32 to; const char* from; bool zero; int bytes; };
struct Sent { float* to; float value; };
struct Fiber {
    ucontext_t context;
    int x, rank;
    Dim block;
    bool done = false;
    std::vector<char> stack = std::vector<char>(128 * 1024);
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
    std::vector<Sent> sent;
    long awaited = 0;  // arrivals in the cluster that it waits for
};
static Fiber* current;
static ucontext_t scheduler;
static Dim blockDim, gridDim;
static int num_ranks;
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

// ---- meeting -------------------------------------------------------------------------------------------------
struct Arrivals { long warps[RANKS][WARPS_OF_A_BLOCK], groups[RANKS][16], blocks[RANKS], numbered[RANKS][16], cluster; };
static Arrivals arrivals;
static long progress;  // meetings begun and threads ended, of all
static void let_others_run() { swapcontext(&current->context, &scheduler); }
static void meet(long& here, int size) {
    progress++;
    const long target = (here++ / size + 1) * size;
    while (here < target) let_others_run();
}
static void __syncwarp() { meet(arrivals.warps[current->rank][current->x / 32], 32); }
static void __syncthreads() { meet(arrivals.blocks[current->rank], blockDim.x); }
template <int number> static void threads_meet(u32 threads) { meet(arrivals.numbered[current->rank][number], threads); }
template <int number> static void threads_arrive(u32) { progress++, arrivals.numbered[current->rank][number]++; }
static void launch_dependents() {}
static void grid_wait() {}
static void nap(u32) {}
template <int> static void more_registers() {}
template <int> static void fewer_registers() {}

// ---- clusters ------------------------------------------------------------------------------------------------
static u32 cluster_rank() { return current->rank; }
static u32 cluster_ranks() { return num_ranks; }
static void cluster_arrive() {
    if (current->awaited) fail("arrives twice without a wait");
    for (auto& s : current->sent) *s.to = s.value;
    current->sent.clear();
    const long size = num_ranks * blockDim.x;
    progress++, current->awaited = (arrivals.cluster++ / size + 1) * size;
}
static void cluster_wait() {
    if (!current->awaited) fail("waits without having arrived");
    while (arrivals.cluster < current->awaited) let_others_run();
    current->awaited = 0;
}
static void cluster_barrier() { cluster_arrive(), cluster_wait(); }
static float* place_in(u32 rank, u32 at) {
    if ((int)rank >= num_ranks || at % 4 || at + 4 > smem_bytes) fail("a place that no block of the cluster has");
    return (float*)(memory[rank] + at);
}
static void store_rank(float* here, u32 rank, float value) {
    float* there = place_in(rank, (char*)here - smem);
    if (num_ranks > 1) current->sent.push_back({there, value});
    else *there = value;
}
static void store_rank4(u32 address, u32 rank, const float* v) {
    if (address % 16) fail("16 bytes across their boundary");
    for (int i = 0; i < 4; i++) store_rank((float*)(smem + address + 4 * i), rank, v[i]);
}
static float load_rank(const float* here, u32 rank) { return *place_in(rank, (const char*)here - smem); }

// ---- memory --------------------------------------------------------------------------------------------------
static u32 shared_address(const void* p) { return (const char*)p - smem; }
static void check_shared(u32 at) {
    if (at % 16 || at + 16 > smem_bytes) fail("16 bytes outside of shared memory, or across their boundary");
}
static void check_tensor(const void* from, long bytes) {
    const char* p = (const char*)from;
    bool inside = false;
    for (int i = 0; i < 2; i++) inside = inside || (p >= first[i] && p + bytes <= last[i]);
    if (!inside || (size_t)p % 16 || bytes % 16) fail("a copy from outside of the tensors, or not aligned");
}
static void land(const Copy& c) {
    if (c.zero) memset(smem + c.to, 0, c.bytes);
    else memcpy(smem + c.to, c.from, c.bytes);
}
static void start_copy(u32 to, const void* from, bool zero) {
    check_shared(to), check_tensor(from, 16);
    const Copy copy = {to, (const char*)from, zero, 16};
    if (draw(2)) land(copy);
    else current->open.push_back(copy);
}
static void copy_async(u32 to, const void* from) { start_copy(to, from, false); }
static void copy_async_if(u32 to, const void* from, bool inside) { if (inside) copy_async(to, from); }
static void copy_or_zero(u32 to, const void* from, bool inside) { start_copy(to, from, !inside); }
static void copy_or_zero(void* to, const void* from, bool inside) { copy_or_zero(shared_address(to), from, inside); }
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
template <int bytes> static void ask_for(const void*) {}
static void prefetch(const void*) {}
static uint4 load_late(const void* p) { return check_tensor(p, 16), *(const uint4*)p; }
static u16 load_late16(const void* p) { return *(const u16*)p; }
static int load_late32(const void* p) { return *(const int*)p; }
// Words that blocks of a running grid exchange: a store lands at once or later, in any order.
struct Store { u64* to; u64 value; };
static std::vector<Store> stores;
static void land_store(size_t i) {
    *stores[i].to = stores[i].value, progress++;
    stores.erase(stores.begin() + i);
}
static void others_run() {
    if (!stores.empty() && draw(64) == 0) land_store(draw(stores.size()));
    let_others_run();
}
static uint2 load_now2(const void* p) { return *(const uint2*)p; }
static uint4 load_now4(const void* p) { return *(const uint4*)p; }
static void store_now2(void* p, u32 a, u32 b) {
    if ((size_t)p % 8) fail("a word that is not aligned");
    stores.push_back({(u64*)p, (u64)b << 32 | a});
    if (draw(2)) land_store(stores.size() - 1);
}
static void store_now4(void* p, u32 a, u32 b, u32 c, u32 d) { store_now2(p, a, b), store_now2((u64*)p + 1, c, d); }
static u32 add_to(u32* p, u32 v) { return *p += v, *p - v; }
static void abandon() { fail("a word does not come"); }
static u64 time_now() { return progress; }

// ---- barriers in shared memory, and bulk copies, which land when somebody waits for them --------------------------
struct Barrier { int count, pending, bytes, phase; };
struct Bulk { u32 to; const char* from; u32 bytes, bar; int rank; };
static std::map<u32, Barrier> barriers[RANKS];
static std::vector<Bulk> bulks;
static Barrier& barrier_at(u32 at) {
    if (!barriers[current->rank].count(at)) fail("a barrier that nobody set up");
    return barriers[current->rank][at];
}
static void settle(Barrier& b) {
    if (b.pending == 0 && b.bytes == 0) b.phase ^= 1, b.pending = b.count;
}
static void bar_init(u32 at, u32 count) { barriers[current->rank][at] = {(int)count, (int)count, 0, 0}; }
static void bar_init_done() {}
static void bar_arrive(u32 at) {
    Barrier& b = barrier_at(at);
    if (--b.pending < 0) fail("more arrivals than a barrier counts");
    settle(b);
}
static void bar_expect(u32 at, u32 bytes) {
    barrier_at(at).bytes += bytes;
    bar_arrive(at);
}
static bool bar_is_past(u32 at, u32 parity) { return barrier_at(at).phase != (int)parity; }
static void bar_wait(u32 at, u32 parity) {
    Barrier& b = barrier_at(at);
    while (b.phase == (int)parity) {
        for (size_t i = 0; i < bulks.size();)
            if (bulks[i].bar == at && bulks[i].rank == current->rank) {
                memcpy(smem + bulks[i].to, bulks[i].from, bulks[i].bytes), b.bytes -= bulks[i].bytes;
                bulks.erase(bulks.begin() + i);
            } else i++;
        if (b.pending == 0 && b.bytes == 0) settle(b);
        else let_others_run();
    }
}
static void bulk_copy_at(u32 to, const void* from, u32 bytes, u32 bar) {
    check_tensor(from, bytes), check_shared(to), check_shared(to + bytes - 16), barrier_at(bar);
    if (draw(2)) memcpy(smem + to, from, bytes);  // here already, though nobody may rely on it
    bulks.push_back({to, (const char*)from, bytes, bar, current->rank});
}
static void stores_before_copies() {}
static u64 read_once() { return 0; }
static void bulk_copy_by(u32 to, const void* from, u32 bytes, u32 bar, u64) { bulk_copy_at(to, from, bytes, bar); }
static void bulk_copy(u32 to, const void* from, u32 bytes, u64* b) { bulk_copy_at(to, from, bytes, shared_address(b)); }
static void barrier_init(u64* b) { bar_init(shared_address(b), 1); }
static void barrier_expect(u64* b, u32 bytes) { bar_expect(shared_address(b), bytes); }
static void barrier_wait(u64* b, u32 parity) { bar_wait(shared_address(b), parity); }
struct __align__(64) TensorMap { u64 opaque[16]; };
static void announce(const TensorMap*) {}

// ---- arithmetic (bf16) ---------------------------------------------------------------------------------------
#define MAGIC16 0x4300u
#define MAGIC 0x43004300u
static float __uint_as_float(u32 u) { float f; memcpy(&f, &u, 4); return f; }
static u32 __float_as_uint(float f) { u32 u; memcpy(&u, &f, 4); return u; }
static float __int_as_float(int i) { return __uint_as_float(i); }
static float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#define __expf expf  // a name of the C library, too
static float rsqrtf(float f) { return 1.f / sqrtf(f); }
static int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) c += (signed char)(a >> i) * (signed char)(b >> i);
    return c;
}
static u32 __byte_perm(u32 a, u32 b, u32 select) {
    u32 r = 0;
    for (int i = 0; i < 32; i += 8) r |= (u32)(((u64)b << 32 | a) >> 8 * (select >> i / 2 & 7) & 255) << i;
    return r;
}
static u32 permute(u32 a, u32 b, u32 select) {
    u32 r = 0;
    for (int i = 0; i < 32; i += 8) {
        const u32 byte = ((u64)b << 32 | a) >> 8 * (select >> i / 2 & 7) & 255;
        r |= (select >> i / 2 & 8 ? byte >> 7 ? 255 : 0 : byte) << i;
    }
    return r;
}
static u32 __funnelshift_r(u32 low, u32 high, u32 by) { return ((u64)high << 32 | low) >> (by & 31); }
static float widen(u32 h) { return __uint_as_float(h << 16); }
static float widen_low(u32 pair) { return widen(pair); }
static float widen_high(u32 pair) { return widen(pair >> 16); }
static u16 narrow(float f) {
    if (f != f) return 0x7fff;
    const u32 u = __float_as_uint(f);
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
static u32 narrow2(float low, float high) { return narrow(low) | (u32)narrow(high) << 16; }
static float half_float(u32 h) {
    const int e = h >> 10 & 31, m = h & 1023;
    const float v = e ? __builtin_ldexpf(1024 + m, e - 25) : __builtin_ldexpf(m, -24);
    return h & 0x8000 ? -v : v;
}
static u32 both(u32 h) { return (h & 0xffff) * 0x10001u; }
static float low_of(float a, float b) { return a != a || b != b ? NAN : min(a, b); }
static float high_of(float a, float b) { return a != a || b != b ? NAN : max(a, b); }
static float power2(float v) { return exp2f(v); }
static float inverse(float v) { return 1.f / v; }
static float root(float v) { return 1.f / sqrtf(v); }
template <class F> static u32 pairwise(u32 a, u32 b, F f) {
    return narrow2(f(widen(a), widen(b)), f(widen_high(a), widen_high(b)));
}
static u32 sub2(u32 a, u32 b) { return pairwise(a, b, [](float x, float y) { return x - y; }); }
static u32 mul2(u32 a, u32 b) { return pairwise(a, b, [](float x, float y) { return x * y; }); }
static u32 mul_relu2(u32 a, u32 b) { return pairwise(a, b, [](float x, float y) { return max(x * y, 0.f); }); }
static u32 max_abs2(u32 a, u32 b) { return pairwise(a, b, [](float x, float y) { return high_of(x, fabsf(y)); }); }
static u32 fma2(u32 a, u32 b, u32 c) {  // one rounding: products of bf16 are exact in double, and so are these sums
    auto one = [](float x, float y, float z) { return (float)((double)x * y + z); };
    return narrow2(one(widen(a), widen(b), widen(c)), one(widen_high(a), widen_high(b), widen_high(c)));
}
static u32 magic_register() { return MAGIC; }
static u32 field(u32 w, u32 mask, u32 magic) { return (w & mask) | magic; }

// ---- what a warp does together: fragments as the PTX manual draws them -----------------------------------------
struct Given { u32 word[9]; };
static Given all_given[RANKS][WARPS_OF_A_BLOCK][32];
struct Exchange {  // what the lanes of a warp give, until all have read it
    Given* lanes = all_given[current->rank][current->x / 32];
    Exchange(std::initializer_list<u32> words) {
        std::copy(words.begin(), words.end(), lanes[current->x % 32].word);
        __syncwarp();
    }
    ~Exchange() { __syncwarp(); }
    u32 operator()(int lane, int word = 0) const { return lanes[lane].word[word]; }
};
static u32 __shfl_sync(u32, u32 v, u32 lane) { return Exchange({v})(lane); }
static u32 __shfl_xor_sync(u32, u32 v, int by) { return __shfl_sync(~0u, v, current->x % 32 ^ by); }
static int __shfl_xor_sync(u32, int v, int by) { return __shfl_xor_sync(~0u, (u32)v, by); }
static float __shfl_xor_sync(u32, float v, int by) { return __uint_as_float(__shfl_xor_sync(~0u, __float_as_uint(v), by)); }
static bool __any_sync(u32, bool v) {
    for (int by = 1; by < 32; by *= 2) v |= __shfl_xor_sync(~0u, (u32)v, by);
    return v;
}
static u32 highest_of_warp(u32 v) {
    for (int by = 1; by < 32; by *= 2) v = std::max(v, __shfl_xor_sync(~0u, v, by));
    return v;
}
static int sum_of_warp(int v) {
    for (int by = 1; by < 32; by *= 2) v += __shfl_xor_sync(~0u, v, by);
    return v;
}
static u32 from_neighbour(u32 v) { return __shfl_xor_sync(~0u, v, 1); }
static u32 transpose8(u32 v) {
    const int lane = current->x % 32, row = lane / 4, col = lane % 4 * 2;
    const Exchange given({v});
    const u32 low = given(col * 4 + row / 2) >> row % 2 * 16, high = given(col * 4 + 4 + row / 2) >> row % 2 * 16;
    return (low & 0xffff) | high << 16;
}
static void load_x(u32* f, u32 address) {
    check_shared(address);
    const int lane = current->x % 32;
    const Exchange given({address});
    for (int m = 0; m < 4; m++) memcpy(f + m, smem + given(m * 8 + lane / 4) + lane % 4 * 4, 4);
}
static void load_x_turned(u32* f, u32 address) {
    load_x(f, address);
    for (int m = 0; m < 4; m++) f[m] = transpose8(f[m]);
}
// f(e, row, column) for the four sums of a lane
template <class F> static void each_sum(F f) {
    const int lane = current->x % 32;
    for (int e = 0; e < 4; e++) f(e, lane / 4 + e / 2 * 8, lane % 4 * 2 + e % 2);
}
static void mma(float* c, const u32* a, u32 b0, u32 b1) {
    const Exchange given({a[0], a[1], a[2], a[3], b0, b1});
    each_sum([&](int e, int row, int col) {
        double sum = c[e];
        for (int k = 0; k < 16; k++) {
            const u32 av = given(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2) >> k % 2 * 16;
            const u32 bv = given(col * 4 + k % 8 / 2, 4 + k / 8) >> k % 2 * 16;
            sum += (double)widen(av) * widen(bv);
        }
        c[e] = sum;
    });
}
static void mma_bytes(int* c, const u32* a, u32 b0, u32 b1) {
    const Exchange given({a[0], a[1], a[2], a[3], b0, b1});
    each_sum([&](int e, int row, int col) {
        for (int k = 0; k < 32; k++) {
            const u32 av = given(row % 8 * 4 + k % 16 / 4, row / 8 + k / 16 * 2) >> k % 4 * 8;
            const u32 bv = given(col * 4 + k % 16 / 4, 4 + k / 16) >> k % 4 * 8;
            c[e] += (int)(av & 255) * (signed char)bv;
        }
    });
}
template <int selector> static void mma_sp(float* c, const u32* a, const u32* b, u32 meta) {
    const Exchange given({a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], meta});
    each_sum([&](int e, int row, int col) {
        double sum = c[e];
        for (int group = 0; group < 8; group++) {  // of four k
            // Two lanes of four hold the metadata, 16 k each: of row g in the lower half, of row g + 8 in the upper.
            const u32 nibble = given(row % 8 * 4 + selector * 2 + group / 4, 8) >> (row / 8 * 16 + group % 4 * 4) & 15;
            if ((nibble & 3) >= nibble >> 2) fail("metadata that is not in order");
            const u32 kept = given(row % 8 * 4 + group % 4, row / 8 + group / 4 * 2);
            for (int i = 0; i < 2; i++) {
                const int k = group * 4 + (nibble >> 2 * i & 3);
                sum += (double)widen(kept >> 16 * i) * widen(given(col * 4 + k % 8 / 2, 4 + k / 8) >> k % 2 * 16);
            }
        }
        c[e] = sum;
    });
}
static void wgmma_fence() {}
static void wgmma_commit() {}
template <int> static void wgmma_wait() {}

// ---- launching -----------------------------------------------------------------------------------------------
static std::function<void()> body;
static void enter() {
    body();
    current->done = true, progress++;
    let_others_run();
}
// A grid of blocks of `warps` warps; clusters of `ranks` blocks along x, one after the other. W and X are what may be read
// asynchronously.
static void launch(const void* W, long w_bytes, const void* X, long x_bytes, int warps, Dim grid, int ranks, int shared,
                   std::function<void()> kernel) {
    smem_bytes = shared, num_ranks = ranks;
    first[0] = (const char*)W, last[0] = first[0] + w_bytes, first[1] = (const char*)X, last[1] = first[1] + x_bytes;
    const int threads = warps * 32;
    blockDim = {threads, 1, 1}, gridDim = grid;
    body = kernel;
    std::vector<Fiber> fibers;
    for (int cluster = 0; cluster < grid.x / ranks * grid.y * grid.z; cluster++) {
        const int x = cluster % (grid.x / ranks) * ranks, y = cluster / (grid.x / ranks) % grid.y;
        memset(memory, 0xff, ranks * sizeof memory[0]);  // NaN
        arrivals = {}, bulks.clear();
        for (auto& some : barriers) some.clear();
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
            if (idle > 20000) fail("all threads wait for ever");
            order.erase(std::remove_if(order.begin(), order.end(), [](Fiber* f) { return f->done; }), order.end());
        }
        for (int r = 0; r < ranks; r++)
            for (u32 i = shared; i < sizeof memory[r]; i++)
                if (memory[r][i] != (char)0xff) printf("shared memory was written behind its end\n"), exit(3);
    }
}
