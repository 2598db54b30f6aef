// y[M, N] = x[M, K] @ w[N, K]^T for few rows M and weights of 2, 3 or 4 bits, on sm_90 and later.
// (lowbit_decode.cu stands in front of this file: the macros of the format, decoding, mma.)
//
// Weights are the A operand of mma.m16n8k16 (16 output rows x 16 k), activations the B operand, so 8 activation
// rows cost one instruction. The weights lie in memory as "chunks" of 16 rows x 128 k (kernels/lowbit_layout.py):
// the words of a lane hold that lane's own fragments, and the chunk ends with its scales, so a chunk is one bulk
// copy and decoding needs no shuffle.
//
//  - every warp streams its row tiles through a ring of its own in shared memory, DEPTH chunks long, and decodes
//    in registers; the main loop has no barrier of the block while one panel of x holds all its inputs. (A ring in
//    registers keeps fewer loads in flight: they share six scoreboards. One thread issuing bulk copies for the block
//    was slower still.)
//  - integers become floats with one LOP3 per pair (a mask and a magic exponent); tables are read two weights at a
//    time from a shared-memory table with one copy per bank.
//  - the inputs are split over `k_warps` warps of a block and over the blocks of a cluster; partial sums meet in
//    (distributed) shared memory and are added in a fixed order: the result does not depend on timing.
//  - the grid may start while its predecessor drains (programmatic dependent launch): weights are fetched first,
//    x only after griddepcontrol.wait.
//
// `lowbit_dense` writes the decoded weight, rounded once from fp32: bit for bit what the Format decodes to.
//
// Macros given by the caller, beside those of lowbit_decode.cu:
//   MT tiles of 8 rows   R row tiles a warp   DEPTH chunks in a warp's ring   WARPS most warps a block   BLOCKS blocks an
//   SM, at least
//   MODE 0: scale the sum of a group; zero points and signs through a second product (least arithmetic)
//        1: subtract the zero point from each weight; scale the sum of a group (integers only)
//        2: scale each weight (least registers; for many rows)
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) lowbit_rows(
    const char* __restrict__ W, const u16* __restrict__ X, u16* __restrict__ Y, const float* __restrict__ table,
    const u16* __restrict__ bias, int N, int K, int M, int pitch_x, int tiles, int chunks, int k_warps, int panel) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int row_warps = (blockDim.x >> 5) / k_warps, row_warp = warp % row_warps, k_warp = warp / row_warps;
    const int block_tiles = row_warps * R, tile0 = blockIdx.y * block_tiles;
    u32 rank, ranks;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(ranks));
    const int share = (chunks + ranks - 1) / ranks;  // chunks of this block
    const int first = min(chunks, (int)rank * share), count = min(chunks - first, share);

    // ---- weights: the chunks first + k_warp + n * k_warps of each tile, DEPTH - 1 of them ahead --------------------
    char* const ring = smem + LUT_BYTES + warp * DEPTH * (R * CHUNK);
    const char* from[R];
    #pragma unroll
    for (int r = 0; r < R; r++)  // a tile past the end reads the last one and writes nothing
        from[r] = W + ((u64)min(tile0 + row_warp * R + r, tiles - 1) * chunks + first + k_warp) * CHUNK + lane * 16;
    const int mine = count > k_warp ? (count - k_warp + k_warps - 1) / k_warps : 0;
    auto fetch = [&](const int slot, const int n) {  // always commits, so that groups can be counted
        if (n < mine) {
            #pragma unroll
            for (int r = 0; r < R; r++) {
                const u32 to = shared_address(ring) + (slot * R + r) * CHUNK + lane * 16;
                const char* chunk = from[r] + (u64)n * k_warps * CHUNK;
                #pragma unroll
                for (int p = 0; p < CHUNK / 16; p += 32)
                    if (p + lane < CHUNK / 16) copy_async(to + p * 16, chunk + p * 16);
            }
        }
        commit();
    };
    for (int p = 0; p < DEPTH - 1; p++) fetch(p, p);
    asm volatile("griddepcontrol.launch_dependents;");

#if TABLE
    for (int e = warp; e < 1 << (2 * BITS); e += blockDim.x >> 5)
        *(u32*)(smem + e * 128 + lane * 4) = narrow(table[e & ((1 << BITS) - 1)]) | (u32)narrow(table[e >> BITS]) << 16;
    const char* lane_lut = smem + lane * 4;
#endif

    // ---- x: panels of `panel` chunks, two of them in turn when one does not hold all -------------------------------
    char* const x_smem = smem + LUT_BYTES + (blockDim.x >> 5) * DEPTH * (R * CHUNK);
    const int x_pitch = panel * 256 + 16;  // the 16 bytes keep ldmatrix free of bank conflicts
    const int panels = (count + panel - 1) / panel;
    auto fetch_x = [&](const int n) {
        const u32 to = shared_address(x_smem) + (n & 1) * M * x_pitch;
        const int k0 = (first + n * panel) * 128, pieces = min(panel, count - n * panel) * 16;
        for (int e = threadIdx.x; e < M * pieces; e += blockDim.x) {
            const int m = e / pieces, piece = e - m * pieces, k = k0 + piece * 8;
            copy_or_zero(to + m * x_pitch + piece * 16, X + (u64)m * pitch_x + min(k, K - 8), k < K);
        }
        commit();
    };
    asm volatile("griddepcontrol.wait;" ::: "memory");
    fetch_x(0);

#if !TABLE
    const u32 magic = magic_register();
#endif
    float acc[R][MT][4];
    #pragma unroll
    for (int r = 0; r < R; r++)
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int i = 0; i < 4; i++) acc[r][m][i] = 0.f;
    u32 x_row[MT];  // this lane's address for ldmatrix; rows past M repeat the last
    #pragma unroll
    for (int m = 0; m < MT; m++)
        x_row[m] = shared_address(x_smem) + min(m * 8 + (lane & 7), M - 1) * x_pitch + (lane >> 3) * 16 + k_warp * 256;

    auto consume = [&](const int slot, const u32 x_at) {
        u32 w[R][NW];
        const char* chunk[R];
        #pragma unroll
        for (int r = 0; r < R; r++) {
            chunk[r] = ring + (slot * R + r) * CHUNK;
            load_words(w[r], chunk[r], lane);
        }
        #pragma unroll
        for (int q = 0; q < NG; q++) {
            u32 grid[R][2];
            #pragma unroll
            for (int r = 0; r < R; r++)
                #pragma unroll
                for (int h = 0; h < 2; h++) grid[r][h] = *(const u32*)(chunk[r] + CODES + q * 64 + g * 4 + h * 32);
#if MODE != 2
            float c[R][MT][4];
            #pragma unroll
            for (int r = 0; r < R; r++)
                #pragma unroll
                for (int m = 0; m < MT; m++)
                    #pragma unroll
                    for (int e = 0; e < 4; e++) c[r][m][e] = 0.f;
#endif
#if MODE == 0 && (!TABLE || TWO)
            // integers: one sum of x for all tiles; two scales: the positive part of each tile
            float c2[TABLE ? R : 1][MT][4];
            #pragma unroll
            for (int r = 0; r < (TABLE ? R : 1); r++)
                #pragma unroll
                for (int m = 0; m < MT; m++)
                    #pragma unroll
                    for (int e = 0; e < 4; e++) c2[r][m][e] = 0.f;
            const u32 one = HALF ? 0x3c003c00u : 0x3f803f80u, ones[4] = {one, one, one, one};
#endif
#if !TABLE && MODE != 0
            u32 zero[R][2];
            #pragma unroll
            for (int r = 0; r < R; r++) {
                zero[r][0] = both((grid[r][0] >> 16) + MAGIC16);
                zero[r][1] = both((grid[r][1] >> 16) * RS + MAGIC16);
            }
#endif
#if MODE == 2
            u32 up[R][2], down[R][2];
            #pragma unroll
            for (int r = 0; r < R; r++)
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    up[r][h] = both_narrow(scale_float(grid[r][h]));
                    down[r][h] = TWO ? both_narrow(-scale_float(grid[r][h] >> 16)) : 0;
                }
#endif
            #pragma unroll
            for (int jj = 0; jj < SPG / 2; jj++) {
                const int j2 = q * (SPG / 2) + jj;
                u32 x[MT][4];
                #pragma unroll
                for (int m = 0; m < MT; m++) load_x(x[m], x_row[m] + x_at + j2 * 64);
                #pragma unroll
                for (int b = 0; b < 2; b++) {
#if MODE == 0 && !TABLE
                    #pragma unroll
                    for (int m = 0; m < MT; m++) mma(c2[0][m], ones, x[m][2 * b], x[m][2 * b + 1]);
#endif
                    #pragma unroll
                    for (int r = 0; r < R; r++) {
                        u32 a[4];
#if TABLE
                        decode(a, w[r], 2 * j2 + b, lane_lut);
#else
                        decode(a, w[r], 2 * j2 + b, magic);
#if MODE != 0
                        #pragma unroll
                        for (int e = 0; e < 4; e++) a[e] = sub2(a[e], zero[r][e & 1]);
#endif
#endif
#if MODE == 2
                        #pragma unroll
                        for (int e = 0; e < 4; e++)
                            // one of the two products is 0, so their difference is exact
                            a[e] = TWO ? sub2(mul_relu2(a[e], up[r][e & 1]), mul_relu2(a[e], down[r][e & 1]))
                                       : mul2(a[e], up[r][e & 1]);
                        #pragma unroll
                        for (int m = 0; m < MT; m++) mma(acc[r][m], a, x[m][2 * b], x[m][2 * b + 1]);
#else
                        #pragma unroll
                        for (int m = 0; m < MT; m++) mma(c[r][m], a, x[m][2 * b], x[m][2 * b + 1]);
#if TWO
                        #pragma unroll
                        for (int e = 0; e < 4; e++) a[e] = relu2(a[e]);
                        #pragma unroll
                        for (int m = 0; m < MT; m++) mma(c2[r][m], a, x[m][2 * b], x[m][2 * b + 1]);
#endif
#endif
                    }
                }
            }
#if MODE != 2
            #pragma unroll
            for (int r = 0; r < R; r++)
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    const u32 bits = grid[r][h];
                    const float up = scale_float(bits);
#if MODE == 0 && !TABLE
                    const float offset = BASE + (float)((bits >> 16) * (h ? RS : 1));
#elif TWO
                    const float down = scale_float(bits >> 16), more = up - down;
#endif
                    #pragma unroll
                    for (int m = 0; m < MT; m++)
                        #pragma unroll
                        for (int e = 2 * h; e < 2 * h + 2; e++) {
#if MODE == 0 && !TABLE
                            acc[r][m][e] += up * (c[r][m][e] - offset * c2[0][m][e]);
#elif TWO
                            acc[r][m][e] += down * c[r][m][e] + more * c2[r][m][e];
#else
                            acc[r][m][e] += up * c[r][m][e];
#endif
                        }
                }
#endif
        }
    };

    const int per_panel = panel / k_warps;  // chunks of this warp in a panel, at least DEPTH - 1 when there are several
    for (int n = 0, i = 0, slot = 0; n < panels; n++) {
        // Groups are done in order. x of panel n was committed DEPTH - 1 or more groups ago, but for the first.
        if (n) wait_all_but<DEPTH - 2>();
        else wait_all_but<0>();
        __syncthreads();  // also: everyone has left panel n - 1, which panel n + 1 overwrites
        if (n + 1 < panels) fetch_x(n + 1);
        const u32 half = (n & 1) * M * x_pitch;
        for (int k = 0; k < per_panel && i < mine; k++, i++) {
            wait_all_but<DEPTH - 2>();
            __syncwarp();  // chunk i is here, and chunk i - 1 has been read by all lanes
            fetch(slot ? slot - 1 : DEPTH - 1, i + DEPTH - 1);
            consume(slot, half + k * k_warps * 256);
            if (++slot == DEPTH) slot = 0;
        }
    }

    // ---- sum over warps and cluster, in order --------------------------------------------------------------------
    __syncthreads();
    float* part = (float*)x_smem;  // over x, which nobody needs any more
    const int rows = block_tiles * 16, pitch = rows + 4;
    #pragma unroll
    for (int r = 0; r < R; r++)
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                const int col = m * 8 + t * 2 + (e & 1), row = (row_warp * R + r) * 16 + g + (e & 2 ? 8 : 0);
                if (col < M) part[(k_warp * M + col) * pitch + row] = acc[r][m][e] * (e & 2 ? 1.f / RS : 1.f);
            }
    if (ranks > 1) asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
    else __syncthreads();
    const int row0 = tile0 * 16;
    for (int e = rank * blockDim.x + threadIdx.x; e < M * rows; e += ranks * blockDim.x) {
        const int col = e / rows, row = e - col * rows;
        if (row0 + row >= N) continue;
        float sum = 0.f;
        for (int p = 0; p < ranks; p++)
            for (int k = 0; k < k_warps; k++) {
                const float* here = part + (k * M + col) * pitch + row;
                float v;
                if (ranks == 1) v = *here;
                else {
                    u32 there;
                    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(p));
                    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
                }
                sum += v;
            }
        if (bias) sum += widen(bias[row0 + row]);
        Y[(u64)col * N + row0 + row] = narrow(sum);
    }
    if (ranks > 1) asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// ---- the whole weight, decoded ---------------------------------------------------------------------------------
// A warp takes one chunk at a time; its 16 x 128 values meet in shared memory and leave as rows of 256 bytes.
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
                    v[0] = levels[pair & ((1 << BITS) - 1)][lane], v[1] = levels[pair >> BITS][lane];
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
