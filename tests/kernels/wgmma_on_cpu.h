// What kernels/lowbit/many_rows.cu needs beside cuda_on_cpu.h, as the PTX manual defines it: boxes by the copy engine with
// its 128-byte swizzle, and wgmma with its second operand found through a descriptor.
#include "cuda_on_cpu.h"

static void load_box(u32 to, const TensorMap* map, int k, int m, u32 bar) {
    const u16* x = (const u16*)map->opaque[0];
    const long rows = map->opaque[1], width = map->opaque[2];
    if (to % 1024 || to + TN * 128 > smem_bytes) fail("a box that is not aligned, or outside of shared memory");
    for (int r = 0; r < TN; r++)
        for (int c = 0; c < 64; c++) {
            const u32 at = to + r * 128 + c * 2;
            *(u16*)(smem + (at ^ (at >> 7 & 7) << 4)) = m + r < rows && k + c < width ? x[(m + r) * width + k + c] : 0;
        }
    barrier_at(bar).bytes -= TN * 128;
    settle(barrier_at(bar));
}
static u32 group_a[RANKS][16][128][4];
static void wgmma(float* c, const u32* a, u32 b) {
    const int group = current->x / 128, thread = current->x % 128, lane = thread % 32, warp = thread / 32;
    auto& given = group_a[current->rank][group];
    if (b >> 16 != 1) fail("another descriptor than this one emulates");
    memcpy(given[thread], a, 16);
    meet(arrivals.groups[current->rank][group], 128);
    const u32 start = (b & 0x3fff) << 4, stride = 1024;
    for (int e = 0; e < TN / 2; e++) {
        const int row = lane / 4 + (e & 2 ? 8 : 0), n = e / 4 * 8 + lane % 4 * 2 + e % 2;
        double sum = c[e];
        for (int k = 0; k < 16; k++) {
            const u32 av = given[warp * 32 + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> k % 2 * 16;
            const u32 at = start + n / 8 * stride + n % 8 * 128 + k * 2;
            sum += (double)widen(av) * widen(*(u16*)(smem + (at ^ (at >> 7 & 7) << 4)));
        }
        c[e] = sum;
    }
    meet(arrivals.groups[current->rank][group], 128);
}
static void wgmma_new(float* c, const u32* a, u32 b) {
    std::fill(c, c + TN / 2, 0.f);
    wgmma(c, a, b);
}

#include "kernel.inc"
extern "C" void run(const char* W, long w_bytes, const u16* X, u16* Y, const float* table, int N, int K, int M, int tiles,
                    int chunks, int blocks, int shared) {
    const TensorMap map = {{(u64)X, (u64)M, (u64)K}};
    launch(W, w_bytes, nullptr, 0, CONSUMERS + 4, {SPLIT, blocks, 1}, SPLIT, shared,
           [=] { lowbit_many_rows(W, map, Y, table, nullptr, N, M, tiles, chunks); });
}
