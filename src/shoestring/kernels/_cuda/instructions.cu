// The instructions that CUDA C++ has no word for without headers, each as a function: the only inline assembly here. Not a
// file of its own to compile: nvrtc.cuda_source puts it in front of every kernel. On a CPU tests/kernels/cuda_on_cpu.h
// stands in its place.
//
// Macro given by the caller: HALF 0 bf16, 1 fp16 activations
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define INLINE __device__ __forceinline__
#if HALF
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif
#define PAIR TYPE "x2"

extern __shared__ __align__(1024) char smem[];

INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- memory: addresses in shared memory are u32 ----------------------------------------------------------------
INLINE void copy_async(u32 to, const void* from) {  // 16 bytes, past L1
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
INLINE void copy_or_zero(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
INLINE void copy_or_zero(void* to, const void* from, bool inside) { copy_or_zero(shared_address(to), from, inside); }
INLINE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int groups> INLINE void wait_all_but() { asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory"); }
template <int bytes> INLINE void ask_for(const void* from) {  // into L2
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "n"(bytes) : "memory");
}
INLINE u16 load_late16(const void* p) {  // from L2: L1 may hold what was there before grid_wait
    u16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}
INLINE void load_x(u32* f, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(address) : "memory");
}

// ---- grids that overlap (programmatic dependent launch), clusters of blocks ---------------------------------------
INLINE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
INLINE void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
INLINE u32 cluster_rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
INLINE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
INLINE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
INLINE void cluster_barrier() { cluster_arrive(), cluster_wait(); }
// The same place in another block's shared memory.
INLINE u32 place_in(u32 rank, const void* here) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(rank));
    return there;
}
INLINE float load_rank(const float* here, u32 rank) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(place_in(rank, here)) : "memory");
    return v;
}
INLINE void store_rank(float* here, u32 rank, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(place_in(rank, here)), "f"(v) : "memory");
}

// ---- 16-bit floats -------------------------------------------------------------------------------------------
INLINE u16 narrow(float f) { u16 h; asm("cvt.rn." TYPE ".f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
INLINE u32 narrow2(float low, float high) {
    u32 d; asm("cvt.rn." PAIR ".f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low)); return d;
}
INLINE float half_float(u32 h) {  // fp16 in the lower half
    float f; asm("{.reg .b16 t; cvt.u16.u32 t, %1; cvt.f32.f16 %0, t;}" : "=f"(f) : "r"(h)); return f;
}
INLINE float widen(u32 h) { return HALF ? half_float(h) : __uint_as_float(h << 16); }  // the lower half
INLINE float widen_high(u32 pair) {
    if (!HALF) return __uint_as_float(pair & 0xffff0000u);
    float f; asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}" : "=f"(f) : "r"(pair)); return f;
}
INLINE u32 both(u32 h) { return __byte_perm(h, 0, 0x1010); }
INLINE u32 sub2(u32 a, u32 b) { u32 d; asm("sub.rn." PAIR " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
INLINE u32 mul2(u32 a, u32 b) { u32 d; asm("mul.rn." PAIR " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
// (w & mask) | MAGIC makes floats of small codes. An instruction takes one constant of 32 bits; left alone, the compiler
// makes two of it.
#define MAGIC16 (HALF ? 0x6400u : 0x4300u)  // 1024 in fp16, 128 in bf16: the step between neighbours is 1
#define MAGIC (MAGIC16 | MAGIC16 << 16)
INLINE u32 magic_register() { u32 m; asm volatile("mov.b32 %0, %1;" : "=r"(m) : "r"(MAGIC)); return m; }
INLINE u32 field(u32 w, u32 mask, u32 magic) {
    u32 d; asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(w), "r"(mask), "r"(magic)); return d;
}

// ---- fp32: not a number where an operand is not --------------------------------------------------------------------
INLINE float low_of(float a, float b) { float d; asm("min.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b)); return d; }
INLINE float high_of(float a, float b) { float d; asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b)); return d; }
INLINE float power2(float v) { float d; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v)); return d; }
INLINE float inverse(float v) { float d; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v)); return d; }
INLINE float root(float v) {  // 1 / sqrt(v), with one step of Newton
    float r; asm("rsqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(v)); return r * (1.5f - 0.5f * v * r * r);
}

// ---- tensor cores ----------------------------------------------------------------------------------------------
// c[16, 8] += a[16, 32] b[32, 8], a 2:4. The lanes 0, 1 (selector 0) or 2, 3 (selector 1) of every four give the metadata.
template <int selector> INLINE void mma_sp(float* c, const u32* a, const u32* b, u32 meta) {
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." TYPE "." TYPE ".f32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9,%10,%11},{%0,%1,%2,%3},%12,%13;"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(meta), "n"(selector));
}

