// The whole weight in bf16 or fp16, rounded once: chunks of kernels/lowbit/chunk_layout.py to rows. (Compiled
// behind decode.cu.)
//
// A warp takes one chunk at a time, gathers its 16 x 128 values in shared memory and writes them as rows of 256 bytes.
#define DENSE_WARPS 8
extern "C" __global__ void __launch_bounds__(DENSE_WARPS * 32) lowbit_dense(
    const char* __restrict__ W, u16* __restrict__ D, const float* __restrict__ table, int K, int first_tile, int chunks,
    int total) {
    __shared__ __align__(16) u32 tile[DENSE_WARPS][16][68];  // 68: rows four banks apart, 16-byte aligned
    __shared__ float levels[TABLE ? 1 << BITS : 1][32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
#if TABLE
    for (int e = warp; e < 1 << BITS; e += DENSE_WARPS) levels[e][lane] = table[e];
    __syncthreads();
#endif
    for (int n = blockIdx.x * DENSE_WARPS + warp; n < total; n += gridDim.x * DENSE_WARPS) {
        const int row_tile = n / chunks, c = n % chunks;
        const char* chunk = W + ((u64)(first_tile + row_tile) * chunks + c) * CHUNK;
        u32 w[NW];
        load_words(w, chunk, lane);
        #pragma unroll
        for (int q = 0; q < NG; q++) {
            float up[2], down[2];
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 grid = *(const u32*)(chunk + CODES + q * 64 + g * 4 + h * 32);
                up[h] = scale_float(grid);
                down[h] = TABLE ? scale_float(grid >> 16) : -(float)(grid >> 16);
            }
            #pragma unroll
            for (int j = q * SPG; j < (q + 1) * SPG; j++) {
#if !TABLE
                u32 a[4];
                decode(a, w, j, MAGIC);
#endif
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int h = i & 1;
                    float v[2];
#if TABLE
                    const u32 pair = pair_index(w, 4 * j + i) >> 7;
                    v[0] = levels[pair & ((1 << BITS) - 1)][lane], v[1] = levels[pair >> SECOND][lane];
                    v[0] *= v[0] > 0 ? up[h] : down[h], v[1] *= v[1] > 0 ? up[h] : down[h];
#else
                    const int rs = h ? RS : 1;
                    v[0] = ((float)((a[i] & 0xff) / rs) + down[h]) * up[h];
                    v[1] = ((float)((a[i] >> 16 & 0xff) / rs) + down[h]) * up[h];
#endif
                    tile[warp][g + 8 * h][j * 8 + t + (i & 2 ? 4 : 0)] = narrow(v[0]) | (u32)narrow(v[1]) << 16;
                }
            }
        }
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            const int row = 2 * i + lane / 16, word = lane % 16 * 4, k = c * 128 + word * 2;
            if (k < K) *(uint4*)(D + (u64)(row_tile * 16 + row) * K + k) = *(const uint4*)&tile[warp][row][word];
        }
        __syncwarp();
    }
}
