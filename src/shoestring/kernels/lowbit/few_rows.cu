// y = [norm] x[M, K] w[N, K]^T [+ bias] [swiglu] [+ residual] for 1 to 16 rows, weights of 2, 3 or 4 bits, sm_90 and later.
// (Compiled behind instructions.cu, decode.cu, digits.cu and few_rows_x.cu: assembly, decoding of weights, loading of x.)
//
// Weights are the A operand of the tensor cores (16 output rows), activations the B operand, so 8 columns of activations
// cost one instruction. Each weight is read once from memory, and this should be the bottleneck. Measured: decoding is slower
// unless it takes few instructions, and so are two blocks of one kernel on an SM, because the hardware spreads them
// unevenly; so a block has an SM for itself.
//
//  - every warp streams its row tiles through a ring of its own in shared memory, DEPTH chunks long, and decodes in
//    registers; the main loop has no block barrier while all of x is in shared memory.
//  - INT8_MMA (up to 8 rows): each chunk of x is a scale times integers of two 8-bit digits, and each
//    digit is a column of B. Codes are bytes at their place in a word, so one AND makes four of them, and sums are exact.
//    Sums of x's digits by group turn zero points into one product per group. Levels of a table are bytes, looked up in
//    two registers by a byte permute; those above and below zero are two products, because their scales may differ.
//  - a dense weight (BITS 16, with XREG) is copied row by row; its fragments are read by ldmatrix.
//  - otherwise codes become pairs of floats (decode.cu). x comes through registers where it is small (XREG: normalised
//    and summed by group on the way), or by bulk copies in panels, double-buffered.
//  - inputs are split over the KW warps of a block and the blocks of a cluster (split-K). Partial sums go to the
//    rings, which are free by then, and are added in a fixed order: the result does not depend on timing.
//  - programmatic dependent launch: the grid may start while its predecessor drains. Rings are filled first; x and the
//    residual are read after grid_wait().
//  - HALF_SM_REGS: a block takes half of an SM, so that blocks of two kernels share it and the weights of the next kernel
//    arrive while this one multiplies. Two blocks of the same kernel on one SM would take twice as long; the host makes
//    sure that they do not fit (kernels/lowbit/few_rows.py), by shared memory or by warps that only hold registers.
//
// Macros given by the caller, beside those of decode.cu:
//   MT 1,2 tiles of 8 columns of activations   R row tiles per warp   WARPS, KW warps of a block and those that share a row tile
//   ONE 1: one row in digits, so that of a lane's two columns the second is empty
//   DEPTH chunks in a warp's ring, EARLY of them fetched before x   XREG, INT8_MMA as above (INT8_MMA with XREG; with TABLE for BITS 3,4)
//   NORM 1: weights in x's dtype, 2: fp32 (with XREG, without clusters)   SWIGLU 1: gate rows, then up rows
//   PAUSE nanoseconds before the first chunk   OUT32 1: y is fp32
//   EXPERTS 1: W holds several weights, and block z multiplies the rows of slot z with one of them. `choice` is the expert of each
//           slot (-1: none), `counts` how many rows it has, at most SLOT_ROWS, `members` which; null: x has a place for each
//           2: one product with the weights of all chosen experts, whose inputs lie one behind the other; y is their sum
//   CHOOSE k: one row, and `choice` is the router's logits, of which every block finds the k largest (NUM_EXPERTS, RENORMALIZE);
//           slot z is the one in place z, and its y is multiplied with its share
//   HALF_SM_REGS 0: a block takes an SM, else it takes half of one: registers that a thread may use
#if HALF_SM_REGS
#define BOUNDS __maxnreg__(HALF_SM_REGS)
#else
#define BOUNDS __launch_bounds__(THREADS, 1)
#endif

extern "C" __global__ void BOUNDS lowbit_few_rows(
    const char* __restrict__ W, const u16* X, void* Y, const float* __restrict__ table, const u16* __restrict__ bias,
    const void* __restrict__ norm, const u16* residual, float eps, int K, int M, int pitch_x, int tiles, int chunks,
    int panel, const void* choice, const int* counts, const int* members, int pitch_slot) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int row_warp = warp % RW, k_warp = warp / RW, tile0 = blockIdx.y * TILES;
    if (HALF_SM_REGS && warp >= WARPS) {  // holds registers only, so that no second block of this kernel fits on the SM
        launch_dependents();
        wait_for_workers();
        return;
    }
#if EXPERTS == 1
    grid_wait();  // the kernels before choose the experts, so nothing can be fetched earlier
#endif
#if CHOOSE
    // With EXPERTS 2 the kernel before has waited for the logits before it let this one start.
    Chosen& chosen = *(Chosen*)(smem + LUT_BYTES + WARPS * RING + 16);
    chosen.find((const float*)choice);
#endif
#if EXPERTS == 1
#if CHOOSE
    const int expert = chosen.expert[blockIdx.z], slot_rows = 1;
    auto row_at = [](const int i) { return i; };
#else
    const int expert = load_late32((const int*)choice + blockIdx.z), slot_rows = SLOT_ROWS, rows_here = load_late32(counts + blockIdx.z);
    int member[SLOT_ROWS];
    #pragma unroll
    for (int i = 0; i < SLOT_ROWS; i++) member[i] = members ? load_late32(members + blockIdx.z * SLOT_ROWS + i) : i;
    auto row_at = [&](const int i) {  // without an index into registers
        int row = member[0];
        #pragma unroll
        for (int n = 1; n < SLOT_ROWS; n++) row = i == n ? member[n] : row;
        return row;
    };
    if (expert < 0) return;
    M = rows_here;
#endif
    W += (u64)expert * tiles * chunks * CHUNK;
    X += (u64)blockIdx.z * pitch_slot;
    Y = (char*)Y + (u64)blockIdx.z * slot_rows * (SWIGLU ? tiles >> 1 : tiles) * 16 * (OUT32 ? 4 : 2);
#else
    auto row_at = [](const int i) { return i; };
#endif
    const u32 rank = HALF_SM_REGS ? 0 : cluster_rank(), ranks = HALF_SM_REGS ? 1 : cluster_ranks();
    const int share = (chunks + ranks - 1) / ranks;  // chunks of this block
    const int first = min(chunks, (int)rank * share), count = min(chunks - first, share);

    // ---- weights: chunks k_warp + n * KW of each tile, DEPTH - 1 of them ahead -------------------------------------
    char* const ring = smem + LUT_BYTES + warp * RING;
    u64* const full = (u64*)(smem + LUT_BYTES + WARPS * RING);  // two barriers: a panel of x is here
#if EXPERTS == 2  // a warp stays with one expert
    const int per_slot = chunks / CHOOSE, slot = k_warp % CHOOSE, begin = k_warp / CHOOSE, stride = KW / CHOOSE;
    const int mine = per_slot > begin ? (per_slot - begin + stride - 1) / stride : 0;
    auto chunk_of = [&](const int i) { return slot * per_slot + begin + i * stride; };
#else
    const int stride = KW;
    const int mine = count > k_warp ? (count - k_warp + KW - 1) / KW : 0;
    auto chunk_of = [&](const int i) { return i * KW + k_warp; };
#endif
    const char* from[R];
    #pragma unroll
    for (int r = 0; r < R; r++) {  // a tile past the end reads the last one and writes nothing
        int tile = tile0 + row_warp * R + r;
        if (SWIGLU) tile = (tile >> 1) + (tile & 1 ? tiles >> 1 : 0);
#if EXPERTS == 2
        from[r] = W + (((u64)chosen.expert[slot] * tiles + min(tile, tiles - 1)) * per_slot + begin) * CHUNK + lane * 16;
#else
#if DENSE  // 16 rows, of which a warp copies two at a time
        from[r] = W + (((u64)min(tile, tiles - 1) * 16 + lane / 16) * K + (first + k_warp) * 128 + lane % 16 * 8) * 2;
#else
        from[r] = W + ((u64)min(tile, tiles - 1) * chunks + first + k_warp) * CHUNK + lane * 16;
#endif
#endif
    }
    int left = mine;
#if TABLE && INT8_MMA
    const uint4 levels = *(const uint4*)table;            // few_rows.py, level_digits
    const float2 worth = *(const float2*)(table + 4);
#elif TABLE
    ask_for_levels(table, warp, lane);
#endif
    if (PAUSE) nap(PAUSE);
#if DENSE
    // Where this lane puts 16 bytes of row p + lane / 16, and finds those of a fragment: pieces of a row change places by its number,
    // against bank conflicts.
    auto piece_at = [&](const int row, const int piece) { return shared_address(ring) + row * 256 + ((piece ^ row & 7) * 16); };
    auto dense_lane = [&](const int p) { return piece_at(p + lane / 16, lane % 16); };
#else
    const u32 ring_lane = shared_address(ring) + lane * 16;
#endif
    auto fetch = [&](const int at) {  // the next chunks to byte `at` of the ring; always commits, so that groups can be counted
        #pragma unroll
        for (int r = 0; r < R; r++) {
            #pragma unroll
#if DENSE
            for (int p = 0; p < 16; p += 2) copy_async_if(dense_lane(p) + at + r * CHUNK, from[r] + (u64)p * K * 2, left > 0);
            from[r] += stride * 256;
#else
            for (int p = 0; p < CHUNK / 16; p += 32)
                copy_async_if(ring_lane + at + r * CHUNK + p * 16, from[r] + p * 16, left > 0 && p + lane < CHUNK / 16);
            from[r] += stride * CHUNK;
#endif
        }
        left--;
        commit();
    };
    for (int p = 0; p < EARLY; p++) fetch(p * (R * CHUNK));
    auto fetch_rest = [&] {
        for (int p = EARLY; p < DEPTH - 1; p++) fetch(p * (R * CHUNK));
    };
    launch_dependents();
#if CHOOSE && EXPERTS == 1
    const float weight = chosen.share(expert);
#endif

#if TABLE && !INT8_MMA
    wait_all_but<EARLY>();
    make_pairs(warp, WARPS, lane);
    const u32 lane_lut = lane * 4;
#else
    const u32 magic = magic_register();
#endif

    // ---- x: panels of `panel` chunks, two of them in turn when one does not hold all -------------------------------
    char* const x_smem = (char*)(full + 2) + CHOSEN_BYTES;
    const int x_pitch = panel * 256 + 16;  // the 16 bytes keep ldmatrix free of bank conflicts
#if XREG
    float* const sums = (float*)(x_smem + M * x_pitch + panel * (INT8_MMA ? 32 : 64));  // [chunk][group][8 MT columns]
    float* const squares = sums + (SUMS ? 1 : INT8_MMA ? 2 : 0) * count * NG * 8 * MT;  // [row][chunk]
    if (NORM)
        for (int e = threadIdx.x * 128; e < K * 2 * NORM; e += THREADS * 128) prefetch((const char*)norm + e);
    take_x(X, norm, x_smem, sums, squares, first, count, K, M, pitch_x, row_at, fetch_rest);
#else
    if (threadIdx.x == 0) barrier_init(full), barrier_init(full + 1);
    join_workers();
    auto fetch_x = [&](const int n) {  // by the first warp
        const u32 to = shared_address(x_smem) + (n & 1) * M * x_pitch + lane * x_pitch;
        const int k0 = (first + n * panel) * 128, k1 = min(k0 + min(panel, count - n * panel) * 128, K);
        if (lane < M)
            for (int k = k1; k % 128; k += 8)  // what fills the last chunk
                *(uint4*)(x_smem + (n & 1) * M * x_pitch + lane * x_pitch + (k - k0) * 2) = make_uint4(0, 0, 0, 0);
        __syncwarp();
        if (lane == 0) barrier_expect(full + (n & 1), M * (k1 - k0) * 2);
        __syncwarp();
        if (lane < M) bulk_copy(to, X + (u64)row_at(lane) * pitch_x + k0, (k1 - k0) * 2, full + (n & 1));
    };
    const int panels = (count + panel - 1) / panel;
    grid_wait();
    if (warp == 0) {
        fetch_x(0);
        if (panels > 1) fetch_x(1);
    }
    fetch_rest();
#endif

    // ---- what is added behind the product, early: it would be waited for at the end --------------------------------
    const int rows_out = TILES * (SWIGLU ? 8 : 16), N = (SWIGLU ? tiles >> 1 : tiles) * 16;
    const int row0 = blockIdx.y * rows_out;
    auto behind = [&](const int e) {
        const int col = e / rows_out, row = row0 + e % rows_out;
        float v = 0.f;
        if (residual && e < M * rows_out && row < N) v = widen(load_late16(residual + (u64)col * N + row));
        return v;
    };
    const float early = behind(rank * THREADS + threadIdx.x);

    float acc[R][MT][4];
    #pragma unroll
    for (int r = 0; r < R; r++)
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int i = 0; i < 4; i++) acc[r][m][i] = 0.f;
#if INT8_MMA
    const char* x_column[MT];  // the digits of this lane's column; columns past the last repeat it
    #pragma unroll
    for (int m = 0; m < MT; m++) {
        const int column = m * 8 + g;
        x_column[m] = x_smem + (min(column % LOW, M - 1) + (column < LOW ? 0 : M)) * 64 + t * 16;
    }
    auto consume = [&](const int at, const u32 x_at, const int chunk_at) {  // the chunks at byte `at` of the ring
        u32 x[MT][8];
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 v = *(const uint4*)(x_column[m] + (chunk_at * 2 + half) * X_GROUP);
                x[m][half * 4] = v.x, x[m][half * 4 + 1] = v.y, x[m][half * 4 + 2] = v.z, x[m][half * 4 + 3] = v.w;
            }
        #pragma unroll
        for (int r = 0; r < R; r++) {
            const char* chunk = ring + at + r * CHUNK;
            u32 w[NW];
            load_words(w, chunk, lane);
#if TABLE
            #pragma unroll
            for (int q = 0; q < NG; q++) {
                int c[2][MT][4];  // below zero, above
                #pragma unroll
                for (int n = 0; n < 8 * MT; n++) c[n / (MT * 4)][n / 4 % MT][n % 4] = 0x4b400000;
                #pragma unroll
                for (int i = q * (4 / NG); i < (q + 1) * (4 / NG); i++) {
                    u32 below[4], above[4];
                    level_bytes(below, above, w, i, levels);
                    #pragma unroll
                    for (int m = 0; m < MT; m++) {
                        mma_bytes(c[0][m], below, x[m][2 * i], x[m][2 * i + 1]);
                        mma_bytes(c[1][m], above, x[m][2 * i], x[m][2 * i + 1]);
                    }
                }
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    const u32 bits = *(const u32*)(chunk + CODES + q * 64 + g * 4 + h * 32);
                    const float up = scale_float(bits) * worth.y, down = scale_float(bits >> 16) * worth.x;
                    #pragma unroll
                    for (int m = 0; m < MT; m++) {
                        const float* const of = sums + ((chunk_at * NG + q) * MT + m) * 16 + 4 * t;
                        #pragma unroll
                        for (int e = 0; e < (ONE ? 1 : 2); e++) {
                            const float low = __int_as_float(c[0][m][2 * h + e]) - SHIFTED, high = __int_as_float(c[1][m][2 * h + e]) - SHIFTED;
                            acc[r][m][2 * h + e] += of[2 * e + 1] * (up * high - down * low);
                        }
                    }
                }
            }
#else
            #pragma unroll
            for (int q = 0; q < NG; q++) {
                int c[BYTE_CHAINS][MT][4];
                #pragma unroll
                for (int n = 0; n < BYTE_CHAINS * MT * 4; n++) c[n / (MT * 4)][n / 4 % MT][n % 4] = n < MT * 4 ? 0x4b400000 : 0;
                #pragma unroll
                for (int i = q * (4 / NG); i < (q + 1) * (4 / NG); i++) {  // 32 inputs
                    u32 a[4];
                    code_bytes(a, w, i);
                    #pragma unroll
                    for (int m = 0; m < MT; m++) mma_bytes(c[i % BYTE_CHAINS][m], a, x[m][2 * i], x[m][2 * i + 1]);
                }
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    const u32 bits = *(const u32*)(chunk + CODES + q * 64 + g * 4 + h * 32);
                    const float up = scale_float(bits), zero = high_half_float(bits) * (h ? BYTE_RS : 1);
                    #pragma unroll
                    for (int m = 0; m < MT; m++) {
                        const float* const of = sums + ((chunk_at * NG + q) * MT + m) * 16 + 4 * t;
                        #pragma unroll
                        for (int e = 0; e < (ONE ? 1 : 2); e++) {
                            const int sum = c[0][m][2 * h + e] + (BYTE_CHAINS == 2 ? c[BYTE_CHAINS - 1][m][2 * h + e] : 0);
                            acc[r][m][2 * h + e] += up * of[2 * e + 1] * (__int_as_float(sum) - (zero * of[2 * e] + SHIFTED));
                        }
                    }
                }
            }
#endif
        }
    };
#else
    u32 x_row[MT];  // this lane's address for ldmatrix; rows past M repeat the last
    #pragma unroll
    for (int m = 0; m < MT; m++)
        x_row[m] = shared_address(x_smem) + min(m * 8 + (lane & 7), M - 1) * x_pitch + (lane >> 3) * 16 + k_warp * 256;

#if DENSE
    auto consume = [&](const int at, const u32 x_at, const int chunk_at) {
        #pragma unroll
        for (int j2 = 0; j2 < 4; j2++) {
            u32 x[MT][4];
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                uint4 v = make_uint4(0, 0, 0, 0);
                if (m * 8 + g < M) v = *(const uint4*)(x_smem + (chunk_at * 4 + j2) * X_GROUP + (m * 8 + g) * 64 + t * 16);
                x[m][0] = v.x, x[m][1] = v.y, x[m][2] = v.z, x[m][3] = v.w;
            }
            #pragma unroll
            for (int b = 0; b < 2; b++)
                #pragma unroll
                for (int r = 0; r < R; r++) {
                    u32 a[4];
                    load_x(a, piece_at(lane & 15, 4 * j2 + 2 * b + lane / 16) + at + r * CHUNK);
                    #pragma unroll
                    for (int m = 0; m < MT; m++) mma(acc[r][m], a, x[m][2 * b], x[m][2 * b + 1]);
                }
        }
    };
#else
    auto consume = [&](const int at, const u32 x_at, const int chunk_at) {  // the chunks at byte `at` of the ring
        u32 w[R][NW];
        const char* chunk[R];
        #pragma unroll
        for (int r = 0; r < R; r++) {
            chunk[r] = ring + at + r * CHUNK;
            load_words(w[r], chunk[r], lane);
        }
        #pragma unroll
        for (int q = 0; q < NG; q++) {
            u32 grid[R][2];
            #pragma unroll
            for (int r = 0; r < R; r++)
                #pragma unroll
                for (int h = 0; h < 2; h++) grid[r][h] = *(const u32*)(chunk[r] + CODES + q * 64 + g * 4 + h * 32);
            float c[CHAINS][R][MT][4], positive[TWO ? R : 1][MT][4];
            #pragma unroll
            for (int r = 0; r < R; r++)
                #pragma unroll
                for (int m = 0; m < MT; m++)
                    #pragma unroll
                    for (int e = 0; e < 4; e++) {
                        #pragma unroll
                        for (int n = 0; n < CHAINS; n++) c[n][r][m][e] = 0.f;
                        if (TWO) positive[r][m][e] = 0.f;
                    }
#if !TABLE && !SUMS
            u32 zero[R][2];
            #pragma unroll
            for (int r = 0; r < R; r++) {
                zero[r][0] = both((grid[r][0] >> 16) + MAGIC16);
                zero[r][1] = both((grid[r][1] >> 16) * RS + MAGIC16);
            }
#endif
            #pragma unroll
            for (int jj = 0; jj < SPG / 2; jj++) {
                const int j2 = q * (SPG / 2) + jj;
                u32 x[MT][4];
                #pragma unroll
                for (int m = 0; m < MT; m++) {
#if XREG
                    uint4 v = make_uint4(0, 0, 0, 0);
                    if (m * 8 + g < M) v = *(const uint4*)(x_smem + (chunk_at * 4 + j2) * X_GROUP + (m * 8 + g) * 64 + t * 16);
                    x[m][0] = v.x, x[m][1] = v.y, x[m][2] = v.z, x[m][3] = v.w;
#else
                    load_x(x[m], x_row[m] + x_at + j2 * 64);
#endif
                }
                #pragma unroll
                for (int b = 0; b < 2; b++)
                    #pragma unroll
                    for (int r = 0; r < R; r++) {
                        u32 a[4];
#if TABLE
                        decode(a, w[r], 2 * j2 + b, lane_lut);
#else
                        decode(a, w[r], 2 * j2 + b, magic);
#if !SUMS
                        #pragma unroll
                        for (int e = 0; e < 4; e++) a[e] = sub2(a[e], zero[r][e & 1]);
#endif
#endif
                        #pragma unroll
                        for (int m = 0; m < MT; m++) mma(c[b % CHAINS][r][m], a, x[m][2 * b], x[m][2 * b + 1]);
#if TWO
                        #pragma unroll
                        for (int e = 0; e < 4; e++) a[e] = relu2(a[e]);
                        #pragma unroll
                        for (int m = 0; m < MT; m++) mma(positive[r][m], a, x[m][2 * b], x[m][2 * b + 1]);
#endif
                    }
            }
#if SUMS
            float2 sum[MT];
            #pragma unroll
            for (int m = 0; m < MT; m++) sum[m] = *(const float2*)(sums + ((chunk_at * NG + q) * MT + m) * 8 + 2 * t);
#endif
            #pragma unroll
            for (int r = 0; r < R; r++)
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    const u32 bits = grid[r][h];
                    const float up = scale_float(bits);
                    const float offset = SUMS ? BASE + (float)((bits >> 16) * (h ? RS : 1)) : 0.f;
                    const float down = TWO ? scale_float(bits >> 16) : 0.f, more = up - down;
                    #pragma unroll
                    for (int m = 0; m < MT; m++)
                        #pragma unroll
                        for (int e = 2 * h; e < 2 * h + 2; e++) {
                            float v = c[0][r][m][e];
                            if (CHAINS == 2) v += c[CHAINS - 1][r][m][e];
#if SUMS
                            v -= offset * (e & 1 ? sum[m].y : sum[m].x);
#endif
                            if (TWO) acc[r][m][e] += down * v + more * positive[r][m][e];
                            else acc[r][m][e] += up * v;
                        }
                }
        }
    };
#endif
#endif

    // ---- the main loop ---------------------------------------------------------------------------------------------
#if XREG && DEPTH > 4  // a loop that is not unrolled: the ring may be as long as the work
    join_workers();
    for (int i = 0, at = 0, before = RING - R * CHUNK; i < mine; i++) {
        wait_all_but<DEPTH - 2>();
        __syncwarp();
        fetch(before);
        consume(at, 0, chunk_of(i));
        before = at;
        if ((at += R * CHUNK) == RING) at = 0;
    }
#elif XREG
    join_workers();
    for (int i = 0; i < mine; i += DEPTH) {
        #pragma unroll
        for (int s = 0; s < DEPTH; s++) {
            if (i + s >= mine) break;
            wait_all_but<DEPTH - 2>();
            __syncwarp();  // chunk i + s is here, and the one before has been read by all lanes
            fetch((s + DEPTH - 1) % DEPTH * (R * CHUNK));
            consume(s * (R * CHUNK), 0, chunk_of(i + s));
        }
    }
#else
    for (int n = 0, i = 0, at = 0, before = RING - R * CHUNK; n < panels; n++) {
        if (n) {
            join_workers();  // all warps have read panel n - 1
            if (warp == 0 && n + 1 < panels) fetch_x(n + 1);
        }
        barrier_wait(full + (n & 1), n >> 1 & 1);
        for (int k = 0; k < panel / KW && i < mine; k++, i++) {
            wait_all_but<DEPTH - 2>();
            __syncwarp();
            fetch(before);
            consume(at, (n & 1) * M * x_pitch + k * (KW * 256), chunk_of(i));
            before = at;
            if ((at += R * CHUNK) == RING) at = 0;
        }
    }
#endif

    // ---- sum over warps and cluster, in order ----------------------------------------------------------------------
    __syncwarp();
    float* const part = (float*)ring;
    #pragma unroll
    for (int r = 0; r < R; r++)
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int e = 0; e < 4; e += ONE ? 2 : 1)
                part[(r * 8 * MT + m * 8 + t * 2 + (e & 1)) * PART + g + (e & 2 ? 8 : 0)] = acc[r][m][e] * (e & 2 ? 1.f / (INT8_MMA ? BYTE_RS : RS) : 1.f);
#if NORM
    for (int m = warp; m < M; m += WARPS) {  // over the partial sums, in order of lanes
        float square = 0.f;
        for (int n = lane; n < count; n += 32) square += squares[m * count + n];
        square = add_lanes(square, 32);
        __syncwarp();
        if (lane == 0) squares[m * count] = rsqrtf(square / K + eps);
    }
#endif
    if (ranks > 1) cluster_barrier();
    else join_workers();
    if (HALF_SM_REGS) workers_are_done();
    auto total_of = [&](const int l, const int col, const int row) {
        float v = 0.f;
        for (u32 p = 0; p < ranks; p++)
            #pragma unroll
            for (int k = 0; k < KW; k++) {
                const float* here = (const float*)(smem + LUT_BYTES + (k * RW + l / R) * RING) + (l % R * 8 * MT + col) * PART + row;
                v += ranks == 1 ? *here : load_rank(here, p);
                if (INT8_MMA) v += ranks == 1 ? here[LOW * PART] : load_rank(here + LOW * PART, p);
            }
#if NORM
        v *= squares[col * count];
#endif
        return v;
    };
    for (int e = rank * THREADS + threadIdx.x, n = 0; e < M * rows_out; e += ranks * THREADS, n++) {
        const int col = e / rows_out, row = e % rows_out;
        if (row0 + row >= N) continue;
        float v = total_of(row / 16 * (SWIGLU + 1), col, row % 16);
        if (bias) v += widen(bias[row0 + row]);
#if SWIGLU
        float up = total_of(row / 16 * 2 + 1, col, row % 16);
        if (bias) up += widen(bias[N + row0 + row]);
        v = v / (1.f + __expf(-v)) * up;
#endif
#if CHOOSE && EXPERTS == 1
        v *= weight;
#endif
        v += n ? behind(e) : early;
        const u64 at = (u64)col * N + row0 + row;
        if (OUT32) ((float*)Y)[at] = v;
        else ((u16*)Y)[at] = narrow(v);
    }
    if (ranks > 1) cluster_barrier();
}
