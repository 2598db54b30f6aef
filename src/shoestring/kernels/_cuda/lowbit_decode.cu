// Codes of 2, 3 and 4 bits to pairs of floats in the registers of a lane, and the instructions that the low-bit kernels
// share. Not a file of its own to compile: it is put in front of lowbit_few.cu, lowbit_wgmma.cu and lowbit_dense.cu.
//
// Macros given by the caller:
//   BITS 2,3,4   TABLE 0 integers (scale, zero), 1 levels from a table   TWO 1: one scale per sign (TABLE only)
//   HALF 0 bf16, 1 fp16 activations   SBF16 1: scales are bf16, 0: fp16   GROUP 32,64,128
#ifndef DIGITS
#define DIGITS 0  // only lowbit_few.cu has them
#endif
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define NG (128 / GROUP)             // scale sets of a chunk
#define SPG (8 / NG)                 // steps of 16 k in a group
#define NW (2 * BITS)                // words of a lane
#define CODES (256 * BITS)           // bytes of codes in a chunk
#define CHUNK (CODES + 64 * NG)
#define MAGIC16 (HALF ? 0x6400u : 0x4300u)  // 1024 in fp16, 128 in bf16: the step between neighbours is 1
#define MAGIC (MAGIC16 | MAGIC16 << 16)
#define BASE (HALF ? 1024.f : 128.f)
// Codes of rows 8..15 are read where they lie, RS times too large; the sum is divided at the end.
#define RS (TABLE ? 1 : BITS == 4 ? (HALF ? 16 : 1) : 4)
#define LUT_BYTES (TABLE && !DIGITS ? 128 * (BITS == 4 ? 256 : BITS == 3 ? 128 : 16) : 0)
#define INLINE __device__ __forceinline__

extern __shared__ __align__(1024) char smem[];

INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- memory --------------------------------------------------------------------------------------------------
INLINE void copy_async(u32 to, const void* from) {  // 16 bytes, past L1
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
INLINE void copy_or_zero(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
INLINE void copy_word_async(u32 to, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory"); }
INLINE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int groups> INLINE void wait_all_but() { asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory"); }

// ---- arithmetic ----------------------------------------------------------------------------------------------
INLINE void mma(float* c, const u32* a, u32 b0, u32 b1) {
#if HALF
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
#endif
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
INLINE void load_x(u32* f, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(address) : "memory");
}
// (w & mask) | MAGIC. An instruction takes one constant of 32 bits; left alone, the compiler makes two of it.
INLINE u32 magic_register() { u32 m; asm volatile("mov.b32 %0, %1;" : "=r"(m) : "r"(MAGIC)); return m; }
INLINE u32 field(u32 w, u32 mask, u32 magic) {
    u32 d; asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(w), "r"(mask), "r"(magic)); return d;
}
#if HALF
#define PAIR "f16x2"
#else
#define PAIR "bf16x2"
#endif
INLINE u32 sub2(u32 a, u32 b) { u32 d; asm("sub.rn." PAIR " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
INLINE u32 mul2(u32 a, u32 b) { u32 d; asm("mul.rn." PAIR " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
INLINE u32 mul_relu2(u32 a, u32 b) {
    u32 d; asm("fma.rn.relu." PAIR " %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0u)); return d;
}
// times one: the multiplier has nothing else to do, the integer unit, where max runs, has
INLINE u32 relu2(u32 a) { return mul_relu2(a, HALF ? 0x3c003c00u : 0x3f803f80u); }
INLINE float half_float(u32 h) { float f; asm("{.reg .b16 t; cvt.u16.u32 t, %1; cvt.f32.f16 %0, t;}" : "=f"(f) : "r"(h)); return f; }
INLINE float scale_float(u32 bits) { return SBF16 ? __uint_as_float(bits << 16) : half_float(bits & 0xffff); }
INLINE u16 narrow(float f) {
    u16 h;
#if HALF
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
#endif
    return h;
}
INLINE float widen(u16 h) {
#if HALF
    return half_float(h);
#else
    return __uint_as_float((u32)h << 16);
#endif
}
INLINE u32 both(u32 h) { return __byte_perm(h, 0, 0x1010); }

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
    // Two bits as above; the third is where a turn of the last words brings it above them.
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
INLINE u32 nibbles(const u32* w, const int j) { return rotate(step_word(w, j), 7) & (BITS == 4 || j > 5 ? ~0u : 0x77777777); }
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
// The table is at the start of shared memory; 4 * lane is its column of a lane. A warp makes every `warps`-th entry. It asks
// for the levels ahead of its weights, because they would arrive behind them, and puts them where its first entry will be.
INLINE void ask_for_levels(const float* table, const int warp, const int lane) {
    if (warp < ENTRIES && lane < 1 << BITS) copy_word_async(shared_address(smem) + warp * 128 + lane * 4, table + lane);
    commit();
}
INLINE void make_pairs(const int warp, const int warps, const int lane) {  // once the levels are there
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

