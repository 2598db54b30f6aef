// How few_rows.cu loads all of x into shared memory (XREG): through registers, in fragment order, and on the way
// normalised, summed by group, or split into 8-bit digits. Compiled between digits.cu and few_rows.cu; the macros of
// few_rows.cu are here.
#define THREADS (WARPS * 32)
#define RW (WARPS / KW)
#define TILES (RW * R)                   // row tiles of a block; even under SWIGLU
#define RING (DEPTH * R * CHUNK)         // bytes of a warp's ring
#define PART 20                          // floats between the columns of partial sums: no bank conflicts
#define SUMS (!TABLE && !DENSE && XREG && !INT8_MMA) // sums of x by group are at hand
#define CHAINS (MT * R == 1 ? 2 : 1)     // sums that a group is gathered in, so that mma need not wait for mma
#define BYTE_CHAINS (HALF_SM_REGS && R * MT * NG == 1 ? 2 : 1)  // the same for INT8_MMA, where few warps have to hide it
#define LOW (4 * MT)                     // INT8_MMA: the column of a row's low digit, less that of its high one
#define X_GROUP (INT8_MMA ? M * 128 + 16 : M * 64 + 16)  // XREG: bytes from 64 inputs (INT8_MMA), or 32, to the next; 16 against bank conflicts

// A barrier of the warps that work, and one that the others wait at until those are done.
INLINE void join_workers() {
    if (HALF_SM_REGS) threads_meet<1>(WARPS * 32);
    else __syncthreads();
}
INLINE void workers_are_done() { threads_arrive<2>(blockDim.x); }
INLINE void wait_for_workers() { threads_meet<2>(blockDim.x); }
INLINE float add_lanes(float v, const int lanes) {  // over `lanes` neighbours
    #pragma unroll
    for (int i = 1; i < lanes; i *= 2) v += __shfl_xor_sync(~0u, v, i);
    return v;
}

#if CHOOSE
// The CHOOSE largest of the router's logits, in every block anew: that costs less than a kernel before. Keys are the bits of a
// float in the order of numbers; their last bits are the expert, so that no two are alike and of equal ones the first wins.
#define KEY_BITS (NUM_EXPERTS <= 64 ? 63 : NUM_EXPERTS <= 128 ? 127 : NUM_EXPERTS <= 256 ? 255 : 1023)
struct Chosen {
    float logit[NUM_EXPERTS];
    u32 key[NUM_EXPERTS];
    int expert[CHOOSE];  // the largest first

    INLINE void find(const float* logits) {
        for (int e = threadIdx.x; e < NUM_EXPERTS; e += THREADS) {
            const int bits = load_late32(logits + e);
            logit[e] = __int_as_float(bits);
            key[e] = ((u32)bits ^ ((u32)(bits >> 31) | 0x80000000u)) & ~(u32)KEY_BITS | (u32)(KEY_BITS - e);
        }
        join_workers();
        for (int e = threadIdx.x; e < NUM_EXPERTS; e += THREADS) {
            const u32 mine = key[e];
            int rank = 0;
            #pragma unroll 16
            for (int f = 0; f < NUM_EXPERTS; f++) rank += key[f] > mine;
            if (rank < CHOOSE) expert[rank] = e;
        }
        join_workers();
    }
    INLINE float share(const int of) const {  // of the softmax over all experts, or over the chosen ones; by a whole warp
        const int lane = threadIdx.x & 31;
        const float top = logit[expert[0]];
        float sum = 0.f;
        for (int e = lane; e < (RENORMALIZE ? CHOOSE : NUM_EXPERTS); e += 32) sum += __expf(logit[RENORMALIZE ? expert[e] : e] - top);
        return __expf(logit[of] - top) / add_lanes(sum, 32);
    }
};
#define CHOSEN_BYTES (((int)sizeof(Chosen) + 15) / 16 * 16)
#else
#define CHOSEN_BYTES 0
#endif

#if XREG
// `row_at`: where row i of the product lies in X; `meanwhile`: what is done while the first loads are on their way
template <class RowAt, class Meanwhile>
INLINE void take_x(const u16* X, const void* __restrict__ norm, char* x_smem, float* sums, float* squares, const int first,
                   const int count, const int K, const int M, const int pitch_x, RowAt row_at, Meanwhile meanwhile) {
    const int warp = threadIdx.x >> 5;
#if INT8_MMA
    // x by chunk as integers times a scale, in two digits of 8 bits. A thread takes 16 inputs of a row: those of word j of
    // all lanes, where byte b for lane t is input 16j + 2t + {0, 8, 1, 9}[b] (4 bits), or 32 (j/2) + 8 (j%2) + 2t + {0, 16, 1, 17}[b].
    const int words = count * 8, apart = BY_STEP ? 8 : 16;
    struct Place { int row, word; };
    auto next = [&](Place at, const int by) {  // without a division
        for (at.word += by; at.word >= words; at.row++) at.word -= words;
        return at;
    };
    auto input_of = [&](const int word) { return first * 128 + (BY_STEP ? word * 16 : word / 2 * 32 + word % 2 * 8); };
    u32 got[2][4];  // pairs
    auto load = [&](const Place at) {
        const int k = input_of(at.word);
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (at.row < M && k < K) v = load_late(X + (u64)row_at(at.row) * pitch_x + k + i * apart);
            got[i][0] = v.x, got[i][1] = v.y, got[i][2] = v.z, got[i][3] = v.w;
        }
    };
    Place at = next({0, 0}, threadIdx.x);
#if NORM
    float by_norm[16];
    auto load_norm = [&](const Place at) {
        const int k = input_of(at.word);
        #pragma unroll
        for (int i = 0; i < 16; i += 8 / NORM) {  // 16 bytes
            uint4 v = make_uint4(0, 0, 0, 0);
            if (at.row < M && k < K) v = *(const uint4*)((const char*)norm + (k + i / 8 * apart + i % 8) * 2 * NORM);
            const u32 words[4] = {v.x, v.y, v.z, v.w};
            #pragma unroll
            for (int n = 0; n < 8 / NORM; n++)
                by_norm[i + n] = NORM == 2 ? __uint_as_float(words[n]) : widen(words[n / 2] >> (n % 2 * 16));
        }
    };
    load_norm(at);  // these are not written by the kernel before
#endif
    grid_wait();
    load(at);
    meanwhile();
    for (int e = warp * 32; e < M * words; e += THREADS) {
        const Place after = next(at, THREADS);
        const bool inside = at.row < M, more = e + THREADS < M * words;
        u32 x[2][4];
        #pragma unroll
        for (int n = 0; n < 8; n++) x[n / 4][n % 4] = got[n / 4][n % 4];
        if (more) load(after);
#if NORM
        float square = 0.f;
        #pragma unroll
        for (int n = 0; n < 8; n++) {
            u32& pair = x[n / 4][n % 4];
            const float a = widen(pair), b = widen(pair >> 16);
            square += a * a + b * b;
            pair = narrow2(a * by_norm[2 * n], b * by_norm[2 * n + 1]);
        }
        square = add_lanes(square, 8);
        if (inside && at.word % 8 == 0) squares[at.row * count + at.word / 8] = square;
        if (more) load_norm(after);
#endif
        u32 most = 0;
        #pragma unroll
        for (int n = 0; n < 8; n++) most = max_abs2(most, x[n / 4][n % 4]);
        #pragma unroll
        for (int i = 1; i < 8; i *= 2) most = max_abs2(most, __shfl_xor_sync(~0u, most, i));
        const Digits digits(most);
        int sum_high = 0, sum_low = 0;
        char* const to = x_smem + at.word / 4 * X_GROUP + at.row * 64 + at.word % 4 * 4;
        #pragma unroll
        for (int c = 0; c < 4; c++) {
            u32 high, low;
            digits.split(x[0][c], x[1][c], high, low);
            sum_low = __dp4a((int)low, 0x01010101, sum_low), sum_high = __dp4a((int)high, 0x01010101, sum_high);
            if (inside) *(u32*)(to + c * 16) = high, *(u32*)(to + M * 64 + c * 16) = low;
        }
        int sum = sum_high * 65536 + sum_low;  // two numbers of 16 bits
        #pragma unroll
        for (int i = 1; i < GROUP / 16; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
        if (inside && at.word % (GROUP / 16) == 0) {  // the sum of a group's digits, and what a digit is worth
            float2* const line = (float2*)sums + at.word / (GROUP / 16) * (8 * MT);
            line[at.row] = make_float2((float)((sum + 0x8000) >> 16), digits.unit);
            line[LOW + at.row] = make_float2((float)(short)sum, digits.unit * (1.f / LOW_UNITS));
        }
        at = after;
    }
#else
    const int lane = threadIdx.x & 31, pieces = count * 16, total = M * pieces;
    uint4 got[4];
    int row[4], piece[4];
    auto load = [&](const int e0) {
        #pragma unroll
        for (int u = 0; u < 4; u++) {
            const int e = e0 + u * THREADS + lane;
            row[u] = e / pieces, piece[u] = e - row[u] * pieces;
            const int k = first * 128 + piece[u] * 8;
            got[u] = make_uint4(0, 0, 0, 0);
            if (e < total && k < K) got[u] = load_late(X + (u64)row_at(row[u]) * pitch_x + k);
        }
    };
    grid_wait();
    load(warp * 32);
    meanwhile();
    for (int e0 = warp * 32; e0 < total; e0 += 4 * THREADS) {
        if (e0 != warp * 32) load(e0);
        #pragma unroll
        for (int u = 0; u < 4; u++) {
            const bool inside = e0 + u * THREADS + lane < total;
            u32 v[4] = {got[u].x, got[u].y, got[u].z, got[u].w};
#if NORM
            const int k = first * 128 + piece[u] * 8;
            float by[8], square = 0.f;
            #pragma unroll
            for (int i = 0; i < 8; i++) by[i] = 0.f;
            if (inside && k < K) {
#if NORM == 1
                const uint4 n = *(const uint4*)((const u16*)norm + k);
                const u32 pairs[4] = {n.x, n.y, n.z, n.w};
                #pragma unroll
                for (int i = 0; i < 8; i++) by[i] = widen(pairs[i / 2] >> (i % 2 * 16));
#else
                #pragma unroll
                for (int i = 0; i < 8; i++) by[i] = ((const float*)norm)[k + i];
#endif
            }
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const float a = widen(v[i]), b = widen(v[i] >> 16);
                square += a * a + b * b;
                v[i] = narrow(a * by[2 * i]) | (u32)narrow(b * by[2 * i + 1]) << 16;
            }
            square = add_lanes(square, 16);
            if (inside && piece[u] % 16 == 0) squares[row[u] * count + piece[u] / 16] = square;
#endif
#if SUMS
            float sum = 0.f;
            #pragma unroll
            for (int i = 0; i < 4; i++) sum += widen(v[i]) + widen(v[i] >> 16);
            sum = add_lanes(sum, GROUP / 8);
            if (inside && piece[u] % (GROUP / 8) == 0) sums[piece[u] / (GROUP / 8) * (8 * MT) + row[u]] = sum;
#endif
            if (inside)  // in the order of fragments: a lane finds those of four instructions side by side
                #pragma unroll
                for (int i = 0; i < 4; i++) *(u32*)(x_smem + piece[u] / 4 * X_GROUP + row[u] * 64 + i * 16 + piece[u] % 4 * 4) = v[i];
        }
    }
#endif
}
#endif

