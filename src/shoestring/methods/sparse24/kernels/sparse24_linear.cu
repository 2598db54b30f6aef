// y[M, N] = x[M, K] @ w[N, K]^T for few rows M and packed 2:4 weights, on sm_90 and later.
//
// Weights are the sparse A operand of mma.sp.m16n8k32 (16 output rows x 32 k, 16 of them kept), activations the B
// operand, so 8 activation rows cost one instruction. The weights lie in memory as "chunks" of 16 rows x 128 k
// (kernels/chunk_layout24.py): a lane finds its fragments and its metadata in its own 16-byte words.
//
//  - a stage is WIDE chunks for each warp and row tile, and the x that belongs to them. DEPTH stages are a ring in shared
//    memory, filled by cp.async; each warp copies the weights that it multiplies itself, all copy x. x comes stage by
//    stage and not at the beginning, because at 16 rows it is as large as a multiprocessor's share of the weights.
//  - kept values of 4 bits become floats with one LOP3 per pair (a mask and a magic exponent), and one subtraction
//    takes this offset and the zero point off. The scale multiplies the sum of a group, or each weight (EACH).
//  - the inputs are split over the K_WARPS warps and over the SPLIT blocks of a cluster; partial sums go to (distributed)
//    shared memory and are added in a fixed order: the result does not depend on timing.
//  - the grid may start while its predecessor drains (programmatic dependent launch): weights are fetched first, x only
//    after griddepcontrol.wait.
//
// `sparse24_dense` writes the decoded weight, rounded once from fp32: bit for bit what the Format decodes to.
//
// Macros given by the caller:
//   BITS 16: values of the activations' dtype; 4: codes with scale and zero   HALF 0 bf16, 1 fp16
//   GROUP 32,64 kept values that share a scale   SBF16 1: scales are bf16, 0: fp16   EACH 1: scale each weight
//   MT tiles of 8 rows of x   ROW_WARPS x K_WARPS warps a block   R row tiles a warp   SPLIT blocks a cluster
//   WIDE chunks of a warp and tile in a stage   DEPTH stages in the ring
//   AHEAD stages prefetched into L2 before x may be read
#define WARPS (ROW_WARPS * K_WARPS)
#define THREADS (WARPS * 32)
#define NG (64 / GROUP)  // scale sets of a chunk
#define SPG (4 / NG)     // steps of 32 k in a group
#define VALUES (BITS == 16 ? 2048 : 512 + 64 * NG)  // bytes before the metadata
#define CHUNK (VALUES + 256)
#define STAGE (WARPS * R * WIDE * CHUNK)       // bytes of weights in a stage
#define PIECES (K_WARPS * WIDE * 16)           // 16-byte pieces of a row of x in a stage
#define X_PITCH (PIECES * 16 + 16)             // the 16 keep ldmatrix free of bank conflicts

INLINE uint4 load16(const void* p) { return *(const uint4*)p; }
INLINE float scale_float(u32 bits) { return SBF16 ? __uint_as_float(bits << 16) : half_float(bits & 0xffff); }

// ---- fragments -----------------------------------------------------------------------------------------------
// a[i] of step j: row (i & 1 ? g + 8 : g), the two kept of k = 32 j + 4 t + (i & 2 ? 16 : 0) ... + 3; g = lane / 4, t = lane % 4.
INLINE void decode4(u32* a, const u32 word, const u32 magic) {
    #pragma unroll
    for (int i = 0; i < 4; i++) a[i] = field(word >> 4 * i, 0x000f000f, magic);
}
INLINE void words(u32* w, const char* at) {
    const uint4 v = load16(at);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
}

// f(Number<first>, a, b), f(Number<first + 1>, a, b), ...: a loop whose index is a constant, as the selector has to be.
template <int n> struct Number { static constexpr int value = n; };
template <int first, int count, class F, class A, class B> INLINE void steps(F& f, A a, B b) {
    if constexpr (count > 0) {
        f(Number<first>(), a, b);
        steps<first + 1, count - 1>(f, a, b);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sparse24_rows(
    const char* __restrict__ W, const u16* __restrict__ X, u16* __restrict__ Y, const u16* __restrict__ bias, int N, int K,
    int M, int pitch_x, int tiles, int chunks) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int row_warp = warp % ROW_WARPS, k_warp = warp / ROW_WARPS, tile0 = blockIdx.y * (ROW_WARPS * R);
    const int rank = SPLIT > 1 ? blockIdx.x : 0;             // in the cluster, which is one row of the grid
    const int share = (chunks + SPLIT - 1) / SPLIT;          // chunks of this block
    const int begin = min(chunks, rank * share), count = min(chunks - begin, share);
    const int stages = (count + K_WARPS * WIDE - 1) / (K_WARPS * WIDE);

    // ---- the ring ------------------------------------------------------------------------------------------------
    const u32 mine = warp * (R * WIDE * CHUNK);  // of a stage
    const u32 x_ring = DEPTH * STAGE, x_stage = M * X_PITCH;
    const char* from[R];
    #pragma unroll
    for (int r = 0; r < R; r++)  // a tile past the end reads the last one and writes nothing
        from[r] = W + ((u64)min(tile0 + row_warp * R + r, tiles - 1) * chunks + begin + k_warp * WIDE) * CHUNK;
    // Chunks of this warp in stage n: WIDE, less or none at the end.
    auto present = [&](const int n) { return count - (n * K_WARPS + k_warp) * WIDE; };
    auto fetch_weights = [&](const int slot, const int n) {
        const int bytes = min(present(n), WIDE) * CHUNK - lane * 16;
        #pragma unroll
        for (int r = 0; r < R; r++) {
            const u32 to = shared_address(smem) + slot * STAGE + mine + r * (WIDE * CHUNK) + lane * 16;
            const char* chunk = from[r] + (u64)n * (K_WARPS * WIDE * CHUNK) + lane * 16;
            #pragma unroll
            for (int p = 0; p < WIDE * CHUNK; p += 512)
                if (p < bytes) copy_async(to + p, chunk + p);
        }
    };
    const int piece = threadIdx.x % PIECES, x_step = THREADS / PIECES;  // every thread copies the same piece of each x_step-th row
    const u32 x_to = shared_address(smem) + x_ring + threadIdx.x / PIECES * X_PITCH + piece * 16;
    const u16* const x_from = X + (u64)(threadIdx.x / PIECES) * pitch_x + (begin * 16 + piece) * 8;
    auto fetch_x = [&](const int slot, const int n) {
        const int k = (begin * 16 + n * PIECES + piece) * 8;
        const bool inside = k < K && n * PIECES + piece < count * 16;
        const u16* row = inside ? x_from + (u64)n * (PIECES * 8) : X;
        u32 to = x_to + slot * x_stage;
        if (n * PIECES >= count * 16) return;
        for (int m = threadIdx.x / PIECES; m < M; m += x_step, to += x_step * X_PITCH) {
            copy_or_zero(to, row, inside);
            if (inside) row += (u64)x_step * pitch_x;
        }
    };
#if AHEAD
    fetch_weights(0, 0);
    if (lane < AHEAD && present(lane + 1) >= WIDE)
        for (int r = 0; r < R; r++) ask_for<WIDE * CHUNK>(from[r] + (u64)(lane + 1) * (K_WARPS * WIDE * CHUNK));
#else
    for (int p = 0; p < DEPTH - 1; p++) fetch_weights(p, p);
#endif
    launch_dependents();
    grid_wait();
    for (int p = 0; p < DEPTH - 1; p++) {
        if (AHEAD && p) fetch_weights(p, p);
        fetch_x(p, p);
        commit();  // always, so that groups can be counted
    }

#if BITS == 4
    const u32 magic = magic_register();
#endif
    float acc[R][MT][4];
    #pragma unroll
    for (int r = 0; r < R; r++)
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int e = 0; e < 4; e++) acc[r][m][e] = 0.f;
    u32 x_row[MT];  // this lane's address for ldmatrix; rows past M repeat the last
    #pragma unroll
    for (int m = 0; m < MT; m++)
        x_row[m] = shared_address(smem) + x_ring + min(m * 8 + (lane & 7), M - 1) * X_PITCH + (lane >> 3) * 16 + k_warp * (WIDE * 256);

    auto consume = [&](const int slot, const int wide) {  // one chunk of each tile
        const char* chunk[R];
        u32 meta[R][2];
        #pragma unroll
        for (int r = 0; r < R; r++) {
            chunk[r] = smem + slot * STAGE + mine + (r * WIDE + wide) * CHUNK;
            const uint2 pair = *(const uint2*)(chunk[r] + VALUES + lane * 8);
            meta[r][0] = pair.x, meta[r][1] = pair.y;
        }
        const u32 x_at = slot * x_stage + wide * 256;
        auto step = [&](auto number, float (*c)[MT][4], auto fragment) {
            constexpr int j = decltype(number)::value;
            u32 x[MT][4];
            #pragma unroll
            for (int m = 0; m < MT; m++) load_x(x[m], x_row[m] + x_at + j * 64);
            #pragma unroll
            for (int r = 0; r < R; r++) {
                u32 a[4];
                fragment(a, r, j);
                #pragma unroll
                for (int m = 0; m < MT; m++) mma_sp<j & 1>(c[r][m], a, x[m], meta[r][j / 2]);
            }
        };
#if BITS == 16
        auto fragment = [&](u32* a, const int r, const int j) { words(a, chunk[r] + j * 512 + lane * 16); };
        steps<0, 4>(step, acc, fragment);
#else
        u32 w[R][4];
        #pragma unroll
        for (int r = 0; r < R; r++) words(w[r], chunk[r] + lane * 16);
        auto group = [&](auto number, auto, auto) {
            constexpr int q = decltype(number)::value;
            u32 zero[R][2], each[R][2];
            float scale[R][2];
            #pragma unroll
            for (int r = 0; r < R; r++)
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    const u32 grid = *(const u32*)(chunk[r] + 512 + q * 64 + g * 4 + h * 32);
                    zero[r][h] = both((grid >> 16) + MAGIC16);
                    scale[r][h] = scale_float(grid);
                    each[r][h] = both(narrow(scale[r][h]));
                }
            auto fragment = [&](u32* a, const int r, const int j) {
                decode4(a, w[r][j], magic);
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    a[i] = sub2(a[i], zero[r][i & 1]);
                    if (EACH) a[i] = mul2(a[i], each[r][i & 1]);
                }
            };
#if EACH
            steps<q * SPG, SPG>(step, acc, fragment);
#else
            float c[R][MT][4];
            #pragma unroll
            for (int r = 0; r < R; r++)
                #pragma unroll
                for (int m = 0; m < MT; m++)
                    #pragma unroll
                    for (int e = 0; e < 4; e++) c[r][m][e] = 0.f;
            steps<q * SPG, SPG>(step, c, fragment);
            #pragma unroll
            for (int r = 0; r < R; r++)
                #pragma unroll
                for (int m = 0; m < MT; m++)
                    #pragma unroll
                    for (int e = 0; e < 4; e++) acc[r][m][e] += scale[r][e / 2] * c[r][m][e];
#endif
        };
        steps<0, NG>(group, 0, 0);
#endif
    };

    for (int i = 0, slot = 0; i < stages; i++) {
        wait_all_but<DEPTH - 2>();
        __syncthreads();  // stage i is here for all, and all have left stage i - 1, which is overwritten now
        const int last = slot ? slot - 1 : DEPTH - 1;
        fetch_weights(last, i + DEPTH - 1);
        fetch_x(last, i + DEPTH - 1);
        commit();
        if (present(i) >= WIDE) {  // without branches between them, so that one chunk's loads pass the other's products
            #pragma unroll
            for (int wide = 0; wide < WIDE; wide++) consume(slot, wide);
        } else {
            for (int wide = 0; wide < present(i); wide++) consume(slot, wide);
        }
        if (++slot == DEPTH) slot = 0;
    }

    // ---- sum over warps and cluster, in order ----------------------------------------------------------------------
    wait_all_but<0>();
    __syncthreads();
    float* part = (float*)smem;  // over the ring, which is no longer needed
    const int rows = ROW_WARPS * R * 16, pitch = rows + 4, row0 = tile0 * 16;
    #pragma unroll
    for (int r = 0; r < R; r++)
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                const int col = m * 8 + t * 2 + (e & 1), row = (row_warp * R + r) * 16 + g + (e & 2 ? 8 : 0);
                if (col < M) part[(k_warp * M + col) * pitch + row] = acc[r][m][e];
            }
    __syncthreads();
    auto write = [&](const int col, const int row, float sum) {
        if (row0 + row >= N) return;
        if (bias) sum += widen(bias[row0 + row]);
        Y[(u64)col * N + row0 + row] = narrow(sum);
    };
    for (int e = threadIdx.x; e < M * rows; e += THREADS) {
        const int col = e / rows, row = e % rows;
        float sum = 0.f;
        #pragma unroll
        for (int k = 0; k < K_WARPS; k++) sum += part[(k * M + col) * pitch + row];
        if (SPLIT == 1) write(col, row, sum);
        else part[col * pitch + row] = sum;
    }
#if SPLIT > 1
    cluster_barrier();
    for (int e = rank * THREADS + threadIdx.x; e < M * rows; e += SPLIT * THREADS) {
        const int col = e / rows, row = e % rows;
        float v[SPLIT], sum = 0.f;
        #pragma unroll
        for (int p = 0; p < SPLIT; p++) v[p] = load_rank(part + col * pitch + row, p);
        #pragma unroll
        for (int p = 0; p < SPLIT; p++) sum += v[p];
        write(col, row, sum);
    }
    cluster_barrier();
#endif
}

// ---- the whole weight, decoded ---------------------------------------------------------------------------------
// A warp takes one chunk at a time, gathers its 16 x 128 values in shared memory and writes them as rows of 256 bytes.
#define DENSE_WARPS 8
extern "C" __global__ void __launch_bounds__(DENSE_WARPS * 32) sparse24_dense(
    const char* __restrict__ W, u16* __restrict__ D, int K, int chunks, int total) {
    __shared__ __align__(16) u64 tile[DENSE_WARPS][16][36];  // groups of four values; rows eight banks apart
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    for (int n = blockIdx.x * DENSE_WARPS + warp; n < total; n += gridDim.x * DENSE_WARPS) {
        const int row_tile = n / chunks, c = n % chunks;
        const char* chunk = W + (u64)n * CHUNK;
        u32 w[4];
        if (BITS == 4) words(w, chunk + lane * 16);
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 a[4];
            if (BITS == 16) words(a, chunk + j * 512 + lane * 16);
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const int h = i & 1;
#if BITS == 4
                const u32 grid = *(const u32*)(chunk + 512 + j / SPG * 64 + g * 4 + h * 32), pair = w[j] >> 4 * i;
                const float scale = scale_float(grid), zero = (float)(grid >> 16);
                a[i] = narrow(((float)(pair & 15) - zero) * scale);
                a[i] |= (u32)narrow(((float)(pair >> 16 & 15) - zero) * scale) << 16;
#endif
                // The lane that gives the instruction this group's metadata.
                const u32 meta = *(const u32*)(chunk + VALUES + (g * 4 + (j & 1) * 2 + i / 2) * 8 + j / 2 * 4);
                const u32 nibble = meta >> (16 * h + 4 * t);
                tile[warp][g + 8 * h][j * 8 + t + (i & 2 ? 4 : 0)] =
                    (u64)(a[i] & 0xffff) << 16 * (nibble & 3) | (u64)(a[i] >> 16) << 16 * (nibble >> 2 & 3);
            }
        }
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            const int row = 2 * i + lane / 16, k = c * 128 + lane % 16 * 8;
            if (k < K) *(uint4*)(D + (u64)(row_tile * 16 + row) * K + k) = load16(&tile[warp][row][lane % 16 * 2]);
        }
        __syncwarp();
    }
}
