// What kernels/_cuda/lowbit_few.cu needs beside cuda_on_cpu.h: bulk copies, which land when somebody waits for their
// barrier, and shuffles. Clusters are of one block here.
#include "cuda_on_cpu.h"

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct Barrier { int phase : 1, arrived : 1, waiting : 30; u32 unused; };  // mbarrier for one arrival
struct Bulk { u32 to, bytes; const char* from; u64* barrier; };
static std::vector<Bulk> bulks;
static long worker_arrivals, end_arrivals;
static void join_workers() { meet(worker_arrivals, WARPS * 32); }
static void workers_are_done() { end_arrivals++; }
static void wait_for_workers() { meet(end_arrivals, blockDim.x); }
static void copy_async_if(u32 to, const void* from, bool inside) { if (inside) copy_async(to, from); }
static void launch_dependents() {}
static void nap(u32) {}
static void grid_wait() {}
static void prefetch(const void*) {}
static uint4 load_late(const void* p) {
    if ((const char*)p < first[1] || (const char*)p + 16 > last[1] || (size_t)p % 16) fail("a load from outside of x");
    return *(const uint4*)p;
}
static u16 load_late16(const void* p) { return *(const u16*)p; }
static void barrier_init(u64* b) { *b = 0; }
static void barrier_expect(u64* b, u32 bytes) { ((Barrier*)b)->arrived = 1, ((Barrier*)b)->waiting += bytes; }
static void bulk_copy(u32 to, const void* from, u32 bytes, u64* b) {
    const char* p = (const char*)from;
    bool inside = false;
    for (int i = 0; i < 2; i++) inside = inside || (p >= first[i] && p + bytes <= last[i]);
    if (!inside || (size_t)p % 16 || bytes % 16) fail("a bulk copy from outside of the tensors");
    check_shared(to), check_shared(to + bytes - 16);
    if (draw(2)) memcpy(smem + to, p, bytes);  // here already, though nobody may rely on it
    bulks.push_back({to, bytes, p, b});
}
static void barrier_wait(u64* b, u32 parity) {
    Barrier& state = *(Barrier*)b;
    while ((state.phase & 1) == (int)parity) {
        for (size_t i = 0; i < bulks.size();)
            if (bulks[i].barrier == b) {
                memcpy(smem + bulks[i].to, bulks[i].from, bulks[i].bytes), state.waiting -= bulks[i].bytes;
                bulks.erase(bulks.begin() + i);
            } else i++;
        if (state.arrived && state.waiting == 0) state.arrived = 0, state.phase ^= 1;
        else swapcontext(&current->context, &scheduler);
    }
}
static void cluster_barrier() { fail("a cluster"); }
static float load_rank(const float*, u32) { fail("a cluster"); return 0; }
static u32 cluster_rank() { return 0; }
static u32 cluster_ranks() { return 1; }
static u32 given[64][32];
static u32 __shfl_sync(u32, u32 v, u32 lane) {
    auto& here = given[current->x / 32];
    here[current->x % 32] = v;
    __syncwarp();
    v = here[lane];
    __syncwarp();
    return v;
}
static float __shfl_xor_sync(u32, float f, int by) {
    u32 v;
    memcpy(&v, &f, 4);
    v = __shfl_sync(~0u, v, current->x % 32 ^ by);
    memcpy(&f, &v, 4);
    return f;
}
static u32 __shfl_xor_sync(u32, u32 v, int by) { return __shfl_sync(~0u, v, current->x % 32 ^ by); }
static int __shfl_xor_sync(u32, int v, int by) { return __shfl_sync(~0u, v, current->x % 32 ^ by); }
static float __expf(float f) { return __builtin_expf(f); }
static float rsqrtf(float f) { return 1 / __builtin_sqrtf(f); }

static u32 __float_as_uint(float f) { u32 u; memcpy(&u, &f, 4); return u; }
static float __int_as_float(int i) { return __uint_as_float(i); }
static float max_abs(float a, float b) { return a != a || b != b ? a + b : max(a, b < 0 ? -b : b); }
static u32 max_abs2(u32 a, u32 b) { return pairwise(a, b, max_abs); }
static u32 fma2(u32 a, u32 b, u32 c) {  // one rounding: products of bf16 are exact in double, and so are these sums
    auto one = [](u32 x, u32 y, u32 z) { return (u32)narrow((float)((double)wide(x) * wide(y) + wide(z))); };
    return one(a & 0xffff, b & 0xffff, c & 0xffff) | one(a >> 16, b >> 16, c >> 16) << 16;
}
static u32 narrow2(float a, float b) { return narrow(a) | (u32)narrow(b) << 16; }
static int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) c += (signed char)(a >> i) * (signed char)(b >> i);
    return c;
}
static float load_now(const float* p) { return *p; }
static float fabsf(float f) { return f < 0 ? -f : f; }
static u32 __reduce_or_sync(u32, u32 v) {
    for (int i = 1; i < 32; i *= 2) v |= __shfl_xor_sync(~0u, v, i);
    return v;
}
static u32 select_bytes(u32 low, u32 high, u32 by) {
    u32 r = 0;
    for (int i = 0; i < 4; i++) {
        const u32 byte = ((u64)high << 32 | low) >> 8 * (by >> 4 * i & 7) & 255;
        r |= (by >> 4 * i & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
    }
    return r;
}
static void mma_bytes(int* c, const u32* a, u32 b0, u32 b1) {
    const int warp = current->x / 32, lane = current->x % 32;
    memcpy(given_a[warp][lane], a, 16);
    given_b[warp][lane][0] = b0, given_b[warp][lane][1] = b1;
    __syncwarp();
    for (int e = 0; e < 4; e++) {
        const int row = lane / 4 + (e / 2) * 8, col = lane % 4 * 2 + e % 2;
        for (int k = 0; k < 32; k++) {
            const u32 av = given_a[warp][row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2] >> k % 4 * 8;
            const u32 bv = given_b[warp][col * 4 + k % 16 / 4][k / 16] >> k % 4 * 8;
            c[e] += (int)(av & 255) * (signed char)bv;
        }
    }
    __syncwarp();
}
static void mma_bytes_new(int* c, const u32* a, u32 b0, u32 b1) {
    c[0] = c[1] = c[2] = c[3] = 0;
    mma_bytes(c, a, b0, b1);
}

#include "kernel.inc"
extern "C" void run(const char* W, long w_bytes, const u16* X, long x_bytes, void* Y, const float* table, const u16* bias,
                    const void* norm, const u16* residual, float eps, int K, int M, int tiles, int chunks, int panel,
                    int blocks, int shared) {
    launch(W, w_bytes, X, x_bytes, WARPS + (BESIDE ? 3 : 0), blocks, shared,
           [=] { lowbit_few(W, X, Y, table, bias, norm, residual, eps, K, M, K, tiles, chunks, panel); });
}
