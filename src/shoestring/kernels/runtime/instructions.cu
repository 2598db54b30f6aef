// The instructions that CUDA C++ has no word for without headers, each as a function: the only inline assembly beside the
// products of wgmma, which kernels/lowbit/many_rows.py writes out. Not a file of its own to compile: nvrtc.cuda_source puts it
// in front of every kernel. On a CPU tests/kernels/cuda_on_cpu.h stands in its place.
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
INLINE void copy_async_if(u32 to, const void* from, bool inside) {  // no branch
    asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;}"
                 ::"r"(to), "l"(from), "r"((u32)inside) : "memory");
}
INLINE void copy_word_async(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
INLINE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int groups> INLINE void wait_all_but() { asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory"); }
template <int bytes> INLINE void ask_for(const void* from) {  // into L2
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "n"(bytes) : "memory");
}
INLINE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
INLINE uint4 load_late(const void* p) {  // from L2: L1 may hold what was there before grid_wait
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
INLINE u16 load_late16(const void* p) {
    u16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}
INLINE void load_x(u32* f, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(address) : "memory");
}

INLINE u32 transpose8(u32 v) {  // pairs of an 8 x 8 matrix over a warp, row lane / 4, columns 2 (lane % 4) and the next
    u32 d; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(v)); return d;
}
INLINE u32 from_neighbour(u32 v) {
    u32 d; asm volatile("shfl.sync.bfly.b32 %0, %1, 1, 0x1f, 0xffffffff;" : "=r"(d) : "r"(v)); return d;
}

// ---- barriers in shared memory, and copies that they wait for ---------------------------------------------------
// Those of one arrival go by their pointer.
INLINE void barrier_init(u64* b) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(shared_address(b)) : "memory");
}
INLINE void barrier_expect(u64* b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
INLINE void barrier_wait(u64* b, u32 parity) {
    asm volatile("{.reg .pred p;\nagain: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p bra again;}" ::"r"(shared_address(b)), "r"(parity) : "memory");
}
INLINE void bulk_copy(u32 to, const void* from, u32 bytes, u64* b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(shared_address(b)) : "memory");
}
INLINE void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
INLINE void bar_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
INLINE void bar_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
INLINE void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
INLINE bool bar_passed(u32 bar, u32 parity) {
    u32 done;
    asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done;
}
INLINE void bar_wait(u32 bar, u32 parity) { while (!bar_passed(bar, parity)) {} }
struct __align__(64) TensorMap { u64 opaque[16]; };
INLINE void announce(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
INLINE void load_box(u32 to, const TensorMap* map, int k, int m, u32 bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(k), "r"(m), "r"(bar) : "memory");
}

// ---- parts of a block -------------------------------------------------------------------------------------------
// A barrier with a number, of so many threads; to arrive is not to wait.
template <int number> INLINE void threads_meet(u32 threads) { asm volatile("bar.sync %0, %1;" ::"n"(number), "r"(threads) : "memory"); }
template <int number> INLINE void threads_arrive(u32 threads) { asm volatile("bar.arrive %0, %1;" ::"n"(number), "r"(threads) : "memory"); }
INLINE void nap(u32 nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds)); }
template <int count> INLINE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count)); }
template <int count> INLINE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count)); }

// ---- grids that overlap (programmatic dependent launch), clusters of blocks ---------------------------------------
INLINE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
INLINE void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
INLINE u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
INLINE u32 cluster_ranks() { u32 r; asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(r)); return r; }
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
INLINE void store_rank4(u32 address, u32 rank, const float* v) {
    asm volatile("{.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "st.shared::cluster.v4.f32 [there], {%2,%3,%4,%5};}"
                 ::"r"(address), "r"(rank), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}

// ---- 16-bit floats -------------------------------------------------------------------------------------------
INLINE u16 narrow(float f) { u16 h; asm("cvt.rn." TYPE ".f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
INLINE u32 narrow2(float low, float high) {
    u32 d; asm("cvt.rn." PAIR ".f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low)); return d;
}
INLINE float half_float(u32 h) {  // fp16 in the lower half
    float f; asm("{.reg .b16 t; cvt.u16.u32 t, %1; cvt.f32.f16 %0, t;}" : "=f"(f) : "r"(h)); return f;
}
INLINE float widen(u16 h) { return HALF ? half_float(h) : __uint_as_float((u32)h << 16); }
INLINE float widen_low(u32 pair) { return HALF ? half_float(pair) : __uint_as_float(pair << 16); }
INLINE float widen_high(u32 pair) {
    if (!HALF) return __uint_as_float(pair & 0xffff0000u);
    float f; asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}" : "=f"(f) : "r"(pair)); return f;
}
INLINE u32 both(u32 h) { return __byte_perm(h, 0, 0x1010); }
INLINE u32 sub2(u32 a, u32 b) { u32 d; asm("sub.rn." PAIR " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
INLINE u32 mul2(u32 a, u32 b) { u32 d; asm("mul.rn." PAIR " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
INLINE u32 fma2(u32 a, u32 b, u32 c) { u32 d; asm("fma.rn." PAIR " %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
INLINE u32 mul_relu2(u32 a, u32 b) {
    u32 d; asm("fma.rn.relu." PAIR " %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0u)); return d;
}
INLINE u32 max_abs2(u32 a, u32 b) {  // of a and |b|; not a number where one of them is not
    u32 d; asm("{.reg .b32 t;\nabs." PAIR " t, %2;\nmax.NaN." PAIR " %0, %1, t;}" : "=r"(d) : "r"(a), "r"(b)); return d;
}
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
// c[16, 8] += a[16, 16] b[16, 8]
INLINE void mma(float* c, const u32* a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// c[16, 8] += a[16, 32] b[32, 8] in integers: a of unsigned bytes, b of signed ones
INLINE void mma_bytes(int* c, const u32* a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int groups> INLINE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory"); }

