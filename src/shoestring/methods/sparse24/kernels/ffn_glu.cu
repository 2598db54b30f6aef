// The gradient of act(gate) * up, drawn and packed for the sparse tensor cores where it is made. Feature-major [F, N]:
//
//     gate, up, dh -> dgate, dup (16 bits), and the operands of MVUE(dgate), MVUE(dup) along the tokens
//
// The same draws as kernels/mvue.py. A warp takes 16 rows of 256 tokens. A lane holds 8 tokens (two groups of four, one
// 16-byte load) of rows r and r + 8 at a time, because those two share a word of metadata; four lanes fill a word's
// two halves, which costs one shuffle. One Philox call serves four rows. Everything after it is selects and byte
// permutations on pairs of 16-bit values.
//
// Macros given by the caller: HALF 0 bf16, 1 fp16   GATE 0 silu, 1 gelu, 2 gelu by tanh (GATES of kernels/activation/glu.py)
INLINE float sigmoid(float x) { return inverse(1.f + power2(x * -1.4426950408889634f)); }

// x, y, d -> d y act'(x), d act(x)
INLINE void glu_grads(float x, float y, float d, float& dx, float& dy) {
#if GATE == 1
    // act = x Phi(x), act' = Phi(x) + x phi(x), where Phi(x) = (1 + erf(x / sqrt 2)) / 2, phi(x) = exp(-x^2 / 2) / sqrt(2 pi)
    const float p = 0.5f + 0.5f * erff(x * 0.70710678118654752f);
    const float density = 0.39894228040143268f * power2(x * x * -0.72134752044448170f);  // log2(e) / 2
    dx = d * y * (p + x * density), dy = d * x * p;
#elif GATE == 2
    // act = x s, where s = (1 + tanh z) / 2 = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3)
    // act' = s + x s' = s + x s (1 - s) (2 z)', where (2 z)' = 2 sqrt(2 / pi) (1 + 3 * 0.044715 x^2)
    // x^2 is at most 1000, where s is 0 or 1: its slope, 0, times infinity would be NaN.
    const float square = fminf(x * x, 1000.f);
    const float s = sigmoid(1.5957691216057308f * x * (1.f + 0.044715f * square));
    dx = d * y * (s + x * s * (1.f - s) * (1.5957691216057308f * (1.f + 0.134145f * square))), dy = d * x * s;
#else
    // act = x s, act' = s (1 + x (1 - s)), where s = sigmoid(x)
    const float s = sigmoid(x), scaled = d * s;
    dx = scaled * y * (1.f + x * (1.f - s)), dy = scaled * x;
#endif
}
INLINE u32 other_half(u32 x) { return __shfl_xor_sync(0xffffffffu, x, 2); }

struct Random { u32 word[4]; };  // for four rows
INLINE Random philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#pragma unroll
    for (int i = 0; i < 10; i++) {
        const u64 p0 = (u64)c0 * 0xD2511F53u, p1 = (u64)c2 * 0xCD9E8D57u;
        c0 = (u32)(p1 >> 32) ^ c1 ^ k0, c1 = (u32)p1;
        c2 = (u32)(p0 >> 32) ^ c3 ^ k1, c3 = (u32)p0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// Four values in two words and 32 random bits -> the two that are kept, in their order; nibble: their places.
INLINE u32 draw(u32 low, u32 high, u32 bits, u32& nibble) {
    const float a0 = fabsf(widen_low(low)), a1 = fabsf(widen_high(low));
    const float a2 = fabsf(widen_low(high)), a3 = fabsf(widen_high(high));
    const float h0 = high_of(a0, a1), h2 = high_of(a2, a3);
    const float top = high_of(h0, h2), rest = (low_of(a0, a1) + low_of(a2, a3)) + low_of(h0, h2);
    const bool heavy = top > rest, big0 = a0 > rest, big1 = a1 > rest, big2 = a2 > rest;
    const float w = heavy ? rest : 0.5f * (rest + top);
    const float s1 = big0 ? 0.f : a0, s2 = s1 + (big1 ? 0.f : a1), s3 = s2 + (big2 ? 0.f : a2);
    const float more = __uint_as_float(bits >> 9 | 0x3f800000u);  // 1 + u
    const float t1 = (more - 1.f) * w, t2 = more * w;
    const int one = (s1 <= t1) + (s2 <= t1) + (s3 <= t1);
    int two = (s1 <= t2) + (s2 <= t2) + (s3 <= t2);
    if (heavy) two = big0 ? 0 : big1 ? 1 : big2 ? 2 : 3;
    int first = min(one, two), second = max(one, two);
    u32 own = heavy ? (one < two ? 0xffff0000u : 0x0000ffffu) : 0u;  // the half that keeps its own value
    u32 some = 0xffffffffu;                                          // what is not empty
    // Rare, hence a branch: the same place twice (the other is any, and empty), or a last value of zero, which is met
    // only by rounding.
    if (one == two || a3 == 0.f) {
        if (second == 3 && a3 == 0.f && w < __uint_as_float(0x7f800000u)) some = 0x0000ffffu;
        if (one == two) {
            own = heavy ? 0xffffffffu : 0u;
            some = one == 3 ? some & 0xffff0000u : 0x0000ffffu;
            first = one == 3 ? 2 : one, second = 3;
        }
    }
    nibble = first | second << 2;
    const u32 pair = __byte_perm(low, high, 0x1010u + first * 0x22u + second * 0x2200u);
    const u32 drawn = (pair & 0x80008000u) | narrow2(w, w);
    return ((pair & own) | (drawn & ~own)) & some;
}

// ---- the kernel ----------------------------------------------------------------------------------------------
// gate is followed by up, dgate by dup, and so are the operand's rows; F % 64 == 0, N % 64 == 0. Grid (N / 256, F / 64).
extern "C" __global__ void __launch_bounds__(128, 4) glu24_grad(
    const uint4* __restrict__ z, const uint4* __restrict__ dh, uint4* __restrict__ dz, uint2* __restrict__ values,
    u32* __restrict__ meta, const int* __restrict__ gate_rows, const int* __restrict__ up_rows,
    const long long* __restrict__ gate_clocks, const long long* __restrict__ up_clocks, int F, int N) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row0 = blockIdx.y * 64 + warp * 16;
    const int eight = blockIdx.x * 8 + lane / 4, j = lane % 4;
    const int octet = blockIdx.x * 32 + lane;  // of tokens
    const bool inside = eight * 32 < N;
    const size_t pitch = N / 8, half = (size_t)F * pitch;  // in 16-byte words
    const size_t block = (size_t)(row0 / 64) * (N / 64) + eight / 2;
    const size_t word = block * 64 + (eight % 2) * 32 + warp * 8;
    const size_t half_words = (size_t)F * (N / 64);
    const int shift = 8 * (j >> 1);

#pragma unroll 1
    for (int q = 0; q < 2; q++) {
        Random random[2][2][2];  // tensor, row r or r + 8, group
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const long long* clocks = t ? up_clocks : gate_clocks;
            const int* rows = t ? up_rows : gate_rows;
            const u32 seed = (u32)clocks[0], seed_high = (u32)(clocks[0] >> 32), layer = (u32)clocks[1];
            const u32 step = (u32)clocks[2], group0 = (u32)(clocks[3] >> 2) + octet * 2;
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const u32 number = (u32)rows[row0 + 8 * b + 4 * q] >> 2;
#pragma unroll
                for (int g = 0; g < 2; g++) random[t][b][g] = philox(group0 + g, number, step, layer, seed, seed_high);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint4 x[2], y[2], d[2];
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const size_t at = (size_t)(row0 + 8 * b + 4 * q + i) * pitch + octet;
                const uint4 zero = {0, 0, 0, 0};
                x[b] = inside ? z[at] : zero, y[b] = inside ? z[half + at] : zero, d[b] = inside ? dh[at] : zero;
            }
            u32 words[2] = {0, 0};
#pragma unroll
            for (int b = 0; b < 2; b++) {
                u32* xs = (u32*)&x[b];
                u32* ys = (u32*)&y[b];
                const u32* ds = (const u32*)&d[b];
#pragma unroll
                for (int p = 0; p < 4; p++) {
                    float dx[2], dy[2];
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const float xe = e ? widen_high(xs[p]) : widen_low(xs[p]), ye = e ? widen_high(ys[p]) : widen_low(ys[p]);
                        const float de = e ? widen_high(ds[p]) : widen_low(ds[p]);
                        glu_grads(xe, ye, de, dx[e], dy[e]);
                    }
                    xs[p] = narrow2(dx[0], dx[1]), ys[p] = narrow2(dy[0], dy[1]);
                }
                const size_t at = (size_t)(row0 + 8 * b + 4 * q + i) * pitch + octet;
                if (inside) dz[at] = x[b], dz[half + at] = y[b];
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    const u32* v = t ? ys : xs;
                    u32 n0, n1;
                    uint2 kept;
                    kept.x = draw(v[0], v[1], random[t][b][0].word[i], n0);
                    kept.y = draw(v[2], v[3], random[t][b][1].word[i], n1);
                    if (inside) values[(t ? half : 0) + at] = kept;
                    words[t] |= (n0 | n1 << 16) << (shift + 4 * b);
                }
            }
#pragma unroll
            for (int t = 0; t < 2; t++) {
                const u32 both = words[t] | other_half(words[t]);
                if (inside && j < 2) meta[2 * ((t ? half_words : 0) + word + 4 * q + i) + j] = both;
            }
        }
    }
}
