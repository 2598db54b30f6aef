// x for lowbit_few.cu where a block takes it whole (XREG): through registers, in the order of the fragments, on the way
// normalised, summed by group, or taken apart into digits. It stands between lowbit_few_ops.cu and lowbit_few.cu, whose
// macros are here.
#define THREADS (WARPS * 32)
#define RW (WARPS / KW)
#define TILES (RW * R)                   // row tiles of a block; even under SWIGLU
#define RING (DEPTH * R * CHUNK)         // bytes of a warp's ring
#define GROUPS (DEPTH / (BULK ? BULK : 1))          // BULK: copies in a warp's ring
#define BARRIERS (BULK ? (WARPS * GROUPS + 1) / 2 * 2 : 0)
#define PART 20                          // floats between the columns of partial sums: no bank conflicts
#define SUMS (!TABLE && XREG && !DIGITS) // sums of x by group are at hand
#define CHAINS (MT * R == 1 ? 2 : 1)     // sums that a group is gathered in, so that mma need not wait for mma
#define BYTE_CHAINS (BESIDE && R * MT * NG == 1 ? 2 : 1)  // the same for DIGITS, where few warps have to hide it
#define LOW (4 * MT)                     // DIGITS: the column of a row's low digit, less that of its high one
#define BYTE_RS (BITS == 4 ? 16 : 4)     // as RS, where codes are bytes
#define SHIFTED 12582912.f               // 1.5 * 2^23: as bits, this plus a small integer is the float of the sum

#if XREG
template <class Meanwhile>  // what is done while the first loads are on their way
INLINE void take_x(const u16* X, const void* __restrict__ norm, char* x_smem, float* sums, float* squares, const int first,
                   const int count, const int K, const int M, const int pitch_x, Meanwhile meanwhile) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#if DIGITS
    // x by chunk as integers of 16 bits times a scale, in two digits of 8 bits. A thread takes 16 inputs of a row: those of
    // word j of all lanes, where byte b for lane t is input 16j + 2t + {0, 8, 1, 9}[b] (4 bits), or
    // 32 (j/2) + 8 (j%2) + 2t + {0, 16, 1, 17}[b].
    const int total = M * count * 8, apart = BITS == 4 ? 8 : 16;
    auto input_of = [&](const int word) { return first * 128 + (BITS == 4 ? word * 16 : word / 2 * 32 + word % 2 * 8); };
    uint4 got[2];
    auto load = [&](const int e) {
        const int row = e / (count * 8), k = input_of(e - row * (count * 8));
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            got[i] = make_uint4(0, 0, 0, 0);
            if (e < total && k < K) got[i] = load_late(X + (u64)row * pitch_x + k + i * apart);
        }
    };
#if NORM
    float by_norm[16];
    auto load_norm = [&](const int e) {
        const int k = input_of(e % (count * 8));
        #pragma unroll
        for (int i = 0; i < 16; i += 8 / NORM) {  // 16 bytes
            uint4 v = make_uint4(0, 0, 0, 0);
            if (e < total && k < K) v = *(const uint4*)((const char*)norm + (k + i / 8 * apart + i % 8) * 2 * NORM);
            const u32 words[4] = {v.x, v.y, v.z, v.w};
            #pragma unroll
            for (int n = 0; n < 8 / NORM; n++)
                by_norm[i + n] = NORM == 2 ? __uint_as_float(words[n]) : widen(words[n / 2] >> (n % 2 * 16));
        }
    };
    load_norm(threadIdx.x);  // these are not written by the kernel before
#endif
    grid_wait();
    load(threadIdx.x);
    meanwhile();
    for (int e = threadIdx.x; e - lane < total; e += THREADS) {
        const int row = e / (count * 8), word = e - row * (count * 8);
        const bool inside = e < total;
        float f[16];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 pairs[4] = {got[i].x, got[i].y, got[i].z, got[i].w};
            #pragma unroll
            for (int n = 0; n < 8; n++) f[i * 8 + n] = widen(pairs[n / 2] >> (n % 2 * 16));
        }
        if (e - lane + THREADS < total) load(e + THREADS);
#if NORM
        float square = 0.f;
        #pragma unroll
        for (int i = 0; i < 16; i++) square += f[i] * f[i];
        square = add_lanes(square, 8);
        if (inside && word % 8 == 0) squares[row * count + word / 8] = square;
        #pragma unroll
        for (int i = 0; i < 16; i++) f[i] *= by_norm[i];
        if (e - lane + THREADS < total) load_norm(e + THREADS);
#endif
        float most = 0.f;
        #pragma unroll
        for (int i = 0; i < 16; i++) most = max_abs(most, f[i]);
        #pragma unroll
        for (int i = 1; i < 8; i *= 2) most = max_abs(most, __shfl_xor_sync(~0u, most, i));
        const float by = most > 0.f ? 32512.f / most : 0.f, scale = most * (1.f / 32512.f);
        int sum_high = 0, sum_low = 0;
        char* const to = x_smem + ((u64)(word / 4) * 2 * M + row) * 64 + word % 4 * 4;
        #pragma unroll
        for (int c = 0; c < 4; c++) {
            u32 v[4];
            #pragma unroll
            for (int b = 0; b < 4; b++) v[b] = __float_as_uint(f[2 * c + (b & 1 ? 8 : 0) + (b & 2 ? 1 : 0)] * by + SHIFTED);
            const u32 low = __byte_perm(__byte_perm(v[0], v[1], 0x0040), __byte_perm(v[2], v[3], 0x0040), 0x5410);
            #pragma unroll
            for (int b = 0; b < 4; b++) v[b] += 128;  // the low digit has a sign
            const u32 high = __byte_perm(__byte_perm(v[0], v[1], 0x0051), __byte_perm(v[2], v[3], 0x0051), 0x5410);
            sum_low = __dp4a((int)low, 0x01010101, sum_low), sum_high = __dp4a((int)high, 0x01010101, sum_high);
            if (inside) *(u32*)(to + c * 16) = high, *(u32*)(to + M * 64 + c * 16) = low;
        }
        const float total_high = add_lanes((float)sum_high, GROUP / 16), total_low = add_lanes((float)sum_low, GROUP / 16);
        if (inside && word % (GROUP / 16) == 0) {  // the sum of a group's digits, and what a digit is worth
            float2* const line = (float2*)sums + word / (GROUP / 16) * (8 * MT);
            line[row] = make_float2(total_high, scale * 256.f), line[LOW + row] = make_float2(total_low, scale);
        }
    }
#else
    const int pieces = count * 16, total = M * pieces;
    uint4 got[4];
    int row[4], piece[4];
    auto load = [&](const int e0) {
        #pragma unroll
        for (int u = 0; u < 4; u++) {
            const int e = e0 + u * THREADS + lane;
            row[u] = e / pieces, piece[u] = e - row[u] * pieces;
            const int k = first * 128 + piece[u] * 8;
            got[u] = make_uint4(0, 0, 0, 0);
            if (e < total && k < K) got[u] = load_late(X + (u64)row[u] * pitch_x + k);
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
                for (int i = 0; i < 4; i++) *(u32*)(x_smem + (piece[u] / 4 * M + row[u]) * 64 + i * 16 + piece[u] % 4 * 4) = v[i];
        }
    }
#endif
}
#endif

