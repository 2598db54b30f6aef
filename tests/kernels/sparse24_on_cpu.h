// kernels/_cuda/sparse24.cu on a CPU (see cuda_on_cpu.h): the sparse matrix instruction as the PTX manual defines it.
#include "cuda_on_cpu.h"

#define INLINE static inline
#define __shared__ static
#undef __align__
#define __align__(n) __attribute__((aligned(n)))
#define MAGIC16 0x4300u
static void launch_dependents() {}
static void grid_wait() {}
static void cluster_barrier() { fail("a cluster"); }
static float load_rank(const float*, u32) { fail("a cluster"); return 0; }
static float widen(u32 h) { return wide(h); }
static u32 both(u32 h) { return h * 0x10001u; }
template <int bytes> static void ask_for(const void*) {}
static u32 given_sparse[64][32][9];
template <int selector> static void mma_sp(float* c, const u32* a, const u32* b, u32 meta) {
    const int warp = current->x / 32, lane = current->x % 32;
    u32* mine = given_sparse[warp][lane];
    memcpy(mine, a, 16), memcpy(mine + 4, b, 16), mine[8] = meta;
    __syncwarp();
    for (int e = 0; e < 4; e++) {
        const int row = lane / 4 + (e / 2) * 8, col = lane % 4 * 2 + e % 2;
        double sum = c[e];
        for (int group = 0; group < 8; group++) {  // of four k
            // Two lanes of four hold the metadata, 16 k each: of row g in the lower half, of row g + 8 in the upper.
            const u32 word = given_sparse[warp][row % 8 * 4 + selector * 2 + group / 4][8];
            const u32 nibble = word >> (row / 8 * 16 + group % 4 * 4) & 15;
            if ((nibble & 3) >= nibble >> 2) fail("metadata that is not in order");
            const u32 kept = given_sparse[warp][row % 8 * 4 + group % 4][row / 8 + group / 4 * 2];
            for (int i = 0; i < 2; i++) {
                const int k = group * 4 + (nibble >> 2 * i & 3);
                const u32 x = given_sparse[warp][col * 4 + k % 8 / 2][4 + k / 8] >> k % 2 * 16;
                sum += (double)wide(kept >> 16 * i & 0xffff) * wide(x & 0xffff);
            }
        }
        c[e] = sum;
    }
    __syncwarp();
}

#include "kernel.inc"
extern "C" void run(const char* W, long w_bytes, const u16* X, long x_bytes, u16* Y, int N, int K, int M, int tiles,
                    int chunks, int blocks, int shared) {
    launch(W, w_bytes, X, x_bytes, WARPS, blocks, shared,
           [=] { sparse24_rows(W, X, Y, nullptr, N, K, M, K, tiles, chunks); });
}
