// 128 inputs as a scale times integers of two 8-bit digits, for products of codes and digits on the integer tensor cores.
// Compiled between decode.cu and what uses it.
#define BY_STEP (TABLE || BITS == 4)     // a word of a lane is 16 inputs, else every other 8 of 32
#define BYTE_RS (TABLE ? 1 : BITS == 4 ? 16 : 4)  // as RS, where codes are bytes
#define SHIFTED 12582912.f               // 1.5 * 2^23: as bits, this plus a small integer is the float of the sum

INLINE float max_abs(float a, float b) { return high_of(a, fabsf(b)); }
INLINE float high_half_float(u32 bits) { return __uint_as_float(__byte_perm(bits, 0x4b000000u, 0x7432)) - 8388608.f; }

#define LOW_UNITS (HALF ? 256 : 128)     // units of the low digit in one of the high digit
// What turns 128 inputs into digits, from the pair of their largest magnitudes.
struct Digits {
    float unit;  // what the high digit counts
#if HALF
    float by;
    INLINE Digits(const u32 most) {
        const float f = max_abs(widen(most & 0xffff), widen(most >> 16));
        by = f > 0.f ? 32512.f / f : 0.f, unit = f * (256.f / 32512.f);
    }
    INLINE void split(const u32 a, const u32 b, u32& high, u32& low) const {  // bytes of a, b, a, b (a, a, b, b for tables)
        const u32 x[4] = {a & 0xffff, TABLE ? a >> 16 : b & 0xffff, TABLE ? b & 0xffff : a >> 16, b >> 16};
        u32 v[4];
        #pragma unroll
        for (int n = 0; n < 4; n++) v[n] = __float_as_uint(widen(x[n]) * by + SHIFTED);
        low = __byte_perm(__byte_perm(v[0], v[1], 0x0040), __byte_perm(v[2], v[3], 0x0040), 0x5410);
        #pragma unroll
        for (int n = 0; n < 4; n++) v[n] += 128;  // the low digit has a sign
        high = __byte_perm(__byte_perm(v[0], v[1], 0x0051), __byte_perm(v[2], v[3], 0x0051), 0x5410);
    }
#else
    // Two inputs an instruction: x times a power of two is below 64, and is n + l / 128 as integers n and l of up to 64 in
    // size. 192 plus an integer of that size is a bf16 whose lower byte is the integer plus 64.
    u32 by;
    INLINE Digits(const u32 most) {
        const u32 a = most >> 7 & 0xff, b = most >> 23, exponent = a > b ? a : b, at_least = exponent > 6 ? exponent : 6;
        by = (259 - at_least) * 0x800080;
        unit = __uint_as_float(exponent == 255 ? 0x7fffffff : (at_least - 5) << 23);  // infinite or not a number: neither is y
    }
    static INLINE u32 bytes(const u32 a, const u32 b) { return __byte_perm(a, b, TABLE ? 0x6420 : 0x6240) + 0x40404040 ^ 0x80808080; }
    INLINE void split(const u32 a, const u32 b, u32& high, u32& low) const {
        const u32 base = 0x43404340, high_a = fma2(a, by, base), high_b = fma2(b, by, base);
        const u32 rest_a = fma2(a, by, sub2(base, high_a)), rest_b = fma2(b, by, sub2(base, high_b));
        high = bytes(high_a, high_b);
        low = bytes(fma2(rest_a, 0x43004300, base), fma2(rest_b, 0x43004300, base));
    }
#endif
};

// Codes as bytes at their place in a word, for 32 inputs from 32 i on: row g, row g + 8 (BYTE_RS times too large), the same for
// the other 16 inputs.
#if DENSE || (TABLE && BITS == 2)
// no codes, or levels that are not used as bytes
#elif TABLE
// Levels as bytes: those below zero without their sign, and those above; 0 in place of the others. `levels`: eight bytes of each,
// by code. With 4 bits they are below 128, so that the code's highest bit, as the highest of a selector, makes them 0.
INLINE void level_bytes(u32* below, u32* above, const u32* w, const int i, const uint4 levels) {
    #pragma unroll
    for (int n = 0; n < 4; n++) {
        u32 v = step_word(w, 2 * i + n / 2);
        if (BITS == 3) v &= 0xbbbbbbbb;
        const u32 codes = rotate(v, n % 2 ? 23 : 7);
        below[n] = permute(levels.x, levels.y, codes);
        above[n] = permute(levels.z, levels.w, BITS == 4 ? codes ^ 0x8888 : codes);
    }
}
#else
INLINE void code_bytes(u32* a, const u32* w, const int i) {
#if BITS == 4
    a[0] = w[2 * i] & 0x0f0f0f0f, a[1] = w[2 * i] & 0xf0f0f0f0;
    a[2] = w[2 * i + 1] & 0x0f0f0f0f, a[3] = w[2 * i + 1] & 0xf0f0f0f0;
#else
    const u32 v = w[i] >> 4;
    a[0] = w[i] & 0x03030303, a[1] = w[i] & 0x0c0c0c0c, a[2] = v & 0x03030303, a[3] = v & 0x0c0c0c0c;
#if BITS == 3
    const u32 top = rotate(w[4 + i / 2], i % 2 * 4), next = rotate(w[4 + i / 2], i % 2 * 4 + 1);
    a[0] = field(top, 0x04040404, a[0]), a[1] = field(top, 0x10101010, a[1]);
    a[2] = field(next, 0x04040404, a[2]), a[3] = field(next, 0x10101010, a[3]);
#endif
#endif
}
#endif
