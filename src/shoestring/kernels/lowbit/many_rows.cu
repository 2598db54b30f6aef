// y[M, N] = x[M, K] @ w[N, K]^T for tens to thousands of rows M and weights of 2, 3 or 4 bits, on sm_90.
//
// Compiled behind decode.cu and behind wgmma(), which kernels/lowbit/many_rows.py writes out for TN columns. Weights are
// operand A of wgmma m64nTNk16, decoded into registers: warp w of a warpgroup holds rows 16w..16w+15 in exactly the
// fragments of mma.m16n8k16, so the chunks of chunk_layout.py serve as they are, four of them for 64 outputs. Activations
// are operand B, in shared memory.
//
//  - WGS warpgroups, 64 outputs each, share the activations of a block: boxes of 64 k x TN rows that one thread of
//    an extra warpgroup fetches with the copy engine (128-byte swizzle) into a ring of STAGES, guarded by mbarriers.
//  - every warp streams its own chunks through a ring of DEPTH and decodes the next 16 STEPS k (a second set of
//    registers) while the tensor cores work on the last; other warpgroups fill the gaps.
//  - LATE: codes less their zero point are multiplied, exactly, and the sums of a chunk are scaled (one group a chunk). This
//    takes TN / 2 instructions instead of 32, and pays for few columns. Else each weight is scaled before the product (one
//    more rounding, as if the weight were stored in x's dtype).
//  - the SPLIT blocks of a cluster share K. Every 8 rows of x belong to one of them, to which the others send their
//    sums, thread for thread; they are added in a fixed order.
//  - with SPLIT 1 a block goes on to the next tile, whose weights and activations are fetched meanwhile.
//  - the grid may start while its predecessor drains: weights first, x only after griddepcontrol.wait.
//
// The instruction count is the bottleneck: 225 for the 16 x 128 weights of a chunk at 4 bits, 120 of which decode.
//
// Tried and slower: weights through the copy engine as well (a fifth; one warp then fetches everything, and the loop has a
// fifth fewer instructions all the same), weights straight into registers, two or three chunks ahead (a tenth fewer
// instructions; 0 to 30%), activations fetched once for two blocks (multicast; a third), K over the warpgroups of a
// block (0 to 7%).
//
// More macros: TN rows of x in a block (a multiple of 8, at most 256)   WGS   STAGES (even)   DEPTH   STEPS 2 or 4
//   SPLIT (every block of a cluster has at least one chunk)   LATE 0 or 1
//   MORE registers of a thread that multiplies, 0: as many as all others
//   OVERLAY 1: sums from the cluster take the place of the rings, where there is no room for both
#define HALF_K 64                        // k of a stage: 128 bytes, one row of the swizzle
#define STAGE_BYTES (TN * 128)
#define CONSUMERS (WGS * 4)              // warps that multiply, 16 outputs each
#define X_AT (LUT_BYTES + 1024)          // the kilobyte before it holds the barriers
#define RINGS_AT (X_AT + STAGES * STAGE_BYTES)
#define WHOLE (CHUNK / 512 * 512)        // bytes of a chunk that all lanes copy, 16 each
#define EMPTY (8 * STAGES)               // from a barrier that says "full" to the one that says "empty"
#define OWNED ((TN / 8 + SPLIT - 1) / SPLIT)  // 8 rows of x whose sums a block of the cluster adds up, at most
#define PLACES (CONSUMERS * 512)         // bytes of 4 sums of every thread
#define PART_AT (OVERLAY ? X_AT : RINGS_AT + CONSUMERS * DEPTH * CHUNK)  // sums from the others

INLINE u32 twice(float f) { return narrow2(f, f); }
// Descriptor of a box, its lower word: K-major, 128-byte swizzle, rows of 128 bytes, groups of 8 rows 1024 bytes apart
// (that is in the upper word, see wgmma()). 16 k further is 32 bytes further, 2 in the descriptor.
INLINE u32 descriptor(u32 address) { return 1 << 16 | address >> 4; }

extern "C" __global__ void __launch_bounds__(CONSUMERS * 32 + 128, 1) lowbit_many_rows(
    const char* __restrict__ W, const __grid_constant__ TensorMap X, u16* __restrict__ Y,
    const float* __restrict__ table, const u16* __restrict__ bias, int N, int M, int tiles, int chunks) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int rank = SPLIT > 1 ? cluster_rank() : 0;
    const int across = (tiles + CONSUMERS - 1) / CONSUMERS, items = across * ((M + TN - 1) / TN);
    const int share = (chunks + SPLIT - 1) / SPLIT, first = min(chunks, rank * share), count = min(chunks - first, share);
    const u32 full = shared_address(smem) + LUT_BYTES;  // barriers; those that say "empty" are EMPTY bytes further
    const u32 x_at = shared_address(smem) + X_AT;

    // ---- weights: DEPTH - 1 chunks ahead, past the end of a tile into the next -------------------------------
    const u32 ring = RINGS_AT + warp * DEPTH * CHUNK;  // offsets in shared memory
    auto chunks_of = [&](const int item) {
        const int tile = item % across * CONSUMERS + warp;  // past the end: the last, and nothing is written
        return W + ((u64)min(tile, tiles - 1) * chunks + first) * CHUNK + lane * 16;
    };
    const int tail = (min(lane, (CHUNK - WHOLE) / 16 - 1) - lane) * 16;  // lanes too many copy the last 16 bytes once more
    int next_item = blockIdx.y, left = count;  // chunks of the tile that have not been asked for
    const char* next = chunks_of(next_item);
    auto fetch = [&](const u32 slot) {  // always commits, so that groups can be counted
        if (left) {
            const u32 to = shared_address(smem) + slot + lane * 16;
            #pragma unroll
            for (int p = 0; p + 32 <= CHUNK / 16; p += 32) copy_async(to + p * 16, next + p * 16);
            copy_async(to + WHOLE + tail, next + WHOLE + tail);
            next += CHUNK;
            if (--left == 0 && SPLIT == 1 && (next_item += gridDim.y) < items) left = count, next = chunks_of(next_item);
        }
        commit();
    };
#if TABLE
    ask_for_levels(table, warp, lane);
#endif
    if (warp < CONSUMERS)
        for (int p = 0; p < DEPTH - 1; p++) fetch(ring + p * CHUNK);
    launch_dependents();
    if (threadIdx.x == CONSUMERS * 32) {
        announce(&X);
        for (int s = 0; s < STAGES; s++) bar_init(full + 8 * s, 1), bar_init(full + EMPTY + 8 * s, CONSUMERS);
        bar_init_done();
    }
#if TABLE
    if (warp < CONSUMERS) wait_all_but<DEPTH - 1>();
    else wait_all_but<0>();
    make_pairs(warp, CONSUMERS + 4, lane);
    const u32 key = lane * 4;  // a lane's column of the table
#else
    const u32 key = magic_register();
#endif
    __syncthreads();
    if (SPLIT > 1 && !OVERLAY) cluster_arrive();  // after all blocks have started, sums may be sent to them

    if (warp >= CONSUMERS) {  // ---- x -----------------------------------------------------------------------
        if (MORE) fewer_registers<24>();
        if (warp == CONSUMERS && lane == 0) {
            grid_wait();
            int stage = 0, turn = 1;
            for (int item = blockIdx.y; item < items; item += gridDim.y)
                for (int u = 0; u < 2 * count; u++) {
                    bar_wait(full + EMPTY + 8 * stage, turn);
                    bar_expect(full + 8 * stage, STAGE_BYTES);
                    load_box(x_at + stage * STAGE_BYTES, &X, first * 128 + u * HALF_K, item / across * TN, full + 8 * stage);
                    if (++stage == STAGES) stage = 0, turn ^= 1;
                }
        }
        __syncwarp();
#if SPLIT > 1
        if (OVERLAY) cluster_arrive();
        cluster_wait(), cluster_arrive(), cluster_wait();
#endif
    } else {
        if (MORE) more_registers<MORE ? MORE : 24>();
        auto release = [&](const u32 bar) {
            if (lane == 0) bar_arrive(bar + EMPTY);
        };
        u32 at = ring, last = ring + (DEPTH - 1) * CHUNK;      // this chunk and the one before
        u32 stage = 0, turn = 0, before = 0;                   // a chunk has two stages
        for (int item = blockIdx.y; item < items; item += gridDim.y) {
            float acc[TN / 2];
            #pragma unroll
            for (int e = 0; e < TN / 2; e++) acc[e] = 0.f;
            u32 a[2][4 * STEPS];
#if LATE
            float sum[TN / 2], scale[2] = {0.f, 0.f};
            #pragma unroll
            for (int e = 0; e < TN / 2; e++) sum[e] = 0.f;
            auto scale_sums = [&] {
                #pragma unroll
                for (int e = 0; e < TN / 2; e++) sum[e] = __fmaf_rn(acc[e], scale[e >> 1 & 1], sum[e]);
            };
#else
            float* const sum = acc;
#endif
            for (int i = 0; i < count; i++) {
                wait_all_but<DEPTH - 2>();
                __syncwarp();  // chunk i is here, and chunk i - 1 has been read by all lanes
                fetch(last);
                last = at;
                const char* chunk = smem + at;
                at = at == ring + (DEPTH - 1) * CHUNK ? ring : at + CHUNK;
                const u32 bar = full + 8 * stage, box = descriptor(x_at) + stage * (STAGE_BYTES / 16);
                u32 w[NW], up[2], down[2], zero[2];
                load_words(w, chunk, lane);
                #pragma unroll
                for (int h = 0; h < 8 / STEPS; h++) {
                    #pragma unroll
                    for (int s = 0; s < STEPS; s++) {
                        const int j = STEPS * h + s;
                        if (j % SPG == 0) {
                            #pragma unroll
                            for (int r = 0; r < 2; r++) {
                                const u32 grid = *(const u32*)(chunk + CODES + j / SPG * 64 + g * 4 + r * 32);
                                const float each = scale_float(grid);
                                up[r] = LATE ? __float_as_uint(each) : twice(each);
                                down[r] = TWO ? twice(-scale_float(grid >> 16)) : 0;
                                zero[r] = TABLE ? 0 : both((grid >> 16) * (r ? RS : 1) + MAGIC16);
                            }
                        }
                        u32* f = a[h & 1] + 4 * s;
                        decode(f, w, j, key);
                        #pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const u32 v = TABLE ? f[e] : sub2(f[e], zero[e & 1]);
                            // two scales: one of the two products is 0, so their difference is exact
                            f[e] = LATE ? v : TWO ? sub2(mul_relu2(v, up[e & 1]), mul_relu2(v, down[e & 1])) : mul2(v, up[e & 1]);
                        }
                    }
                    const int half = h * STEPS / 4;  // of the chunk, which is a stage of x
                    const bool opens = h * STEPS % 4 == 0;
                    if (opens) bar_wait(bar + 8 * half, turn);
#if LATE
                    if (h == 0) wgmma_wait<0>(), scale_sums();  // of the chunk before
#endif
                    wgmma_fence();
                    #pragma unroll
                    for (int s = 0; s < STEPS; s++)
                        (LATE && h + s == 0 ? wgmma_new : wgmma)(  // the first product of a chunk begins new sums
                            acc, a[h & 1] + 4 * s, box + half * (STAGE_BYTES / 16) + (h * STEPS % 4 + s) * 2);
                    wgmma_commit();
                    wgmma_wait<1>();  // the products before these are done: their registers are free, and so may be their box
                    if (opens && (half || i)) release(half ? bar : before);
                }
                before = bar + 8;
#if LATE
                scale[0] = __uint_as_float(up[0]), scale[1] = __uint_as_float(up[1]);
#endif
                stage += 2;
                if (stage == STAGES) stage = 0, turn ^= 1;
            }
            wgmma_wait<0>();
            release(before);
#if LATE
            scale_sums();
#endif
            grid_wait();

            // ---- sums: 8 rows of x belong to one block of the cluster, which gets them from the others --------------
#if SPLIT > 1
            const u32 place = PART_AT + threadIdx.x * 16;
            if (OVERLAY) cluster_arrive();
            cluster_wait();
            #pragma unroll
            for (int q = 0; q < TN / 8; q++) {
                const int owner = q % SPLIT, distance = rank - owner + (rank < owner ? SPLIT : 0);
                const u32 there = shared_address(smem) + place + ((distance - 1) * OWNED + q / SPLIT) * PLACES;
                if (distance) store_rank4(there, owner, sum + 4 * q);
            }
            cluster_arrive();
            cluster_wait();
#endif
            // ---- to memory: 16 outputs of 8 rows at a time, 32 bytes each --------------------------------------------
            const int out = (item % across * CONSUMERS + warp) * 16, m0 = item / across * TN, cols = min(TN, M - m0);
            if (out >= N) continue;
            const float b0 = bias ? widen(bias[out + g]) : 0.f, b1 = bias ? widen(bias[out + g + 8]) : 0.f;
            #pragma unroll
            for (int q = 0; q < TN / 8; q++) {
                float* const v = sum + 4 * q;
#if SPLIT > 1
                if (q % SPLIT != rank) continue;
                #pragma unroll
                for (int p = 0; p < SPLIT - 1; p++) {
                    const float4 more = *(const float4*)(smem + place + (p * OWNED + q / SPLIT) * PLACES);
                    v[0] += more.x, v[1] += more.y, v[2] += more.z, v[3] += more.w;
                }
#endif
                const u32 low = transpose8(narrow(v[0] + b0) | (u32)narrow(v[1] + b0) << 16);
                const u32 high = transpose8(narrow(v[2] * (1.f / RS) + b1) | (u32)narrow(v[3] * (1.f / RS) + b1) << 16);
                const u32 other = from_neighbour(t & 1 ? low : high);  // even lanes store outputs 0..7, odd ones 8..15
                uint2 four;
                four.x = t & 1 ? other : low, four.y = t & 1 ? high : other;
                if (q * 8 + g < cols) *(uint2*)(Y + (u64)(m0 + q * 8 + g) * N + out + (t & 1) * 8 + (t >> 1) * 4) = four;
            }
        }
    }
}
