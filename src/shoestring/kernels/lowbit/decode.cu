// Codes of 2, 3 and 4 bits to pairs of floats in the registers of a lane. Compiled in front of few_rows.cu, many_rows.cu and
// decode_dense.cu. (BITS 16: the weight is dense, and there is nothing to decode.)
//
// Macros given by the caller:
//   BITS 2,3,4   TABLE 0 integers (scale, zero), 1 levels from a table   TWO 1: one scale per sign (TABLE only)
//   HALF 0 bf16, 1 fp16 activations   SBF16 1: scales are bf16, 0: fp16   GROUP 32,64,128
#define NG (128 / GROUP)             // scale sets of a chunk
#define SPG (8 / NG)                 // steps of 16 k in a group
#define NW (2 * BITS)                // words of a lane
#define CODES (256 * BITS)           // bytes of codes in a chunk
#define DENSE (BITS == 16)
#define CHUNK (CODES + (DENSE ? 0 : 64 * NG))
#define BASE (HALF ? 1024.f : 128.f)
// Codes of rows 8..15 are read where they lie, RS times too large; the sum is divided at the end.
#define RS (TABLE || DENSE ? 1 : BITS == 4 ? (HALF ? 16 : 1) : 4)
#if TABLE && !INT8_MMA
#define LUT_BYTES (128 * (BITS == 4 ? 256 : BITS == 3 ? 128 : 16))
#else
#define LUT_BYTES 0
#endif

// by a product with one: the multiplier is idle, while max would use the busy integer unit
INLINE u32 relu2(u32 a) { return mul_relu2(a, HALF ? 0x3c003c00u : 0x3f803f80u); }
INLINE float scale_float(u32 bits) { return SBF16 ? __uint_as_float(bits << 16) : half_float(bits & 0xffff); }

#if !DENSE
// ---- codes to pairs of floats --------------------------------------------------------------------------------
// a[i] of step j: row (i & 1 ? g + 8 : g), k = 16 j + 2 t + (i & 2 ? 8 : 0) and the next; g = lane / 4, t = lane % 4.
INLINE void load_words(u32* w, const char* chunk, const int lane) {
    uint4 v = *(const uint4*)(chunk + lane * 16);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
#if BITS == 4
    v = *(const uint4*)(chunk + 512 + lane * 16);
    w[4] = v.x, w[5] = v.y, w[6] = v.z, w[7] = v.w;
#elif BITS == 3
    uint2 u = *(const uint2*)(chunk + 512 + lane * 8);
    w[4] = u.x, w[5] = u.y;
#endif
}
INLINE u32 rotate(u32 w, const int right) { return __funnelshift_r(w, w, right & 31); }
#if !TABLE
INLINE void decode(u32* a, const u32* w, const int j, const u32 magic) {
#if BITS == 4
    u32 v = w[j];
#if HALF
    a[0] = field(v, 0x000f000f, magic), a[1] = field(v, 0x00f000f0, magic);
    a[2] = field(v >> 8, 0x000f000f, magic), a[3] = field(v >> 8, 0x00f000f0, magic);
#else
    a[0] = field(v, 0x000f000f, magic), a[1] = field(v >> 4, 0x000f000f, magic);
    a[2] = field(v >> 8, 0x000f000f, magic), a[3] = field(v >> 12, 0x000f000f, magic);
#endif
#elif BITS == 2
    u32 v = w[j / 2], s = j % 2 * 8;
    a[0] = field(v >> s, 0x00030003, magic), a[1] = field(v >> s, 0x000c000c, magic);
    a[2] = field(v >> (s + 4), 0x00030003, magic), a[3] = field(v >> (s + 4), 0x000c000c, magic);
#else
    // Two bits as above; a rotation of the last words puts the third bit above them.
    const u32 v = w[j / 2] >> (j % 2 * 8), u = w[j / 2] >> (j % 2 * 8 + 4);
    const int turn = j % 2 * 8 + (j / 2 % 2 ? 4 : 0);
    const u32 top = rotate(w[4 + j / 4], turn), next = rotate(w[4 + j / 4], turn + 1);
    a[0] = field(top, 0x00040004, field(v, 0x00030003, magic)), a[1] = field(top, 0x00100010, field(v, 0x000c000c, magic));
    a[2] = field(next, 0x00040004, field(u, 0x00030003, magic)), a[3] = field(next, 0x00100010, field(u, 0x000c000c, magic));
#endif
}
#else
// The codes of step j are the nibbles of a word, the first at bit 7: those of row g for k = 2t, 2t + 1, 2t + 8, 2t + 9 (beside
// 16 j), then those of row g + 8. With 3 bits the fourth bits of the first six words are the codes of the last two steps. (2 bits:
// pairs of codes one after the other.)
#if BITS > 2
INLINE u32 step_word(const u32* w, const int j) {  // with 3 bits, fourth bits may be anything
    if (BITS == 4 || j < 6) return w[j];
    const int b = (j - 6) * 3;
    return (rotate(w[b], 3) & 0x88888888) | (rotate(w[b + 1], 2) & 0x11111111) | (rotate(w[b + 2], 1) & 0x22222222);
}
#endif
// A pair of codes is an index, read at bit 7: times 128 bytes, the distance of entries.
#define ENTRIES (BITS == 4 ? 256 : BITS == 3 ? 128 : 16)
#define SECOND (BITS == 2 ? 2 : 4)       // the bit of an index where the second code begins
#define INDEX_MASK ((BITS == 4 ? 0xffu : BITS == 3 ? 0x77u : 0xfu) << 7)
INLINE u32 pair_word(const u32* w, const int p) {
#if BITS == 2
    return rotate(w[p / 8], p % 8 * 4);
#else
    return rotate(step_word(w, p / 4), p % 2 * 16 + p % 4 / 2 * 8);
#endif
}
INLINE u32 pair_index(const u32* w, const int p) { return pair_word(w, p) & INDEX_MASK; }
// The table is at the start of shared memory; lane's column is at 4 * lane. A warp makes every `warps`-th entry. It loads the
// levels before its weights, which would delay them, to the place of its first entry.
INLINE void ask_for_levels(const float* table, const int warp, const int lane) {
    if (warp < ENTRIES && lane < 1 << BITS) copy_word_async(shared_address(smem) + warp * 128 + lane * 4, table + lane);
    commit();
}
INLINE void make_pairs(const int warp, const int warps, const int lane) {  // after the levels have arrived
    if (warp >= ENTRIES) return;
    const float* const level = (const float*)(smem + warp * 128);
    auto pair = [&](const int e) { return narrow(level[e & ((1 << BITS) - 1)]) | (u32)narrow(level[e >> SECOND & ((1 << BITS) - 1)]) << 16; };
    __syncwarp();
    for (int e = warp + warps; e < ENTRIES; e += warps) *(u32*)(smem + e * 128 + lane * 4) = pair(e);
    const u32 first = pair(warp);
    __syncwarp();
    *(u32*)(smem + warp * 128 + lane * 4) = first;
}
INLINE void decode(u32* a, const u32* w, const int j, const u32 lane4) {
    #pragma unroll
    for (int i = 0; i < 4; i++) a[i] = *(const u32*)(smem + field(pair_word(w, 4 * j + i), INDEX_MASK, lane4));
}
#endif
#endif
