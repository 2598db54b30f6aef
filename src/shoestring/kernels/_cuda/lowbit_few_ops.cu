// Instructions that only lowbit_few.cu uses: early launch, loads of what other kernels wrote, barriers and bulk copies,
// byte products, clusters. It stands behind lowbit_decode.cu.
INLINE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
INLINE void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// A barrier of the warps that work, and one that the others wait at until those are done.
INLINE void join_workers() {
    if (BESIDE) asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
    else __syncthreads();
}
INLINE void workers_are_done() { asm volatile("bar.arrive 2, %0;" ::"r"(blockDim.x) : "memory"); }
INLINE void wait_for_workers() { asm volatile("bar.sync 2, %0;" ::"r"(blockDim.x) : "memory"); }
INLINE void copy_async_if(u32 to, const void* from, bool inside) {  // 16 bytes, past L1; no branch
    asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;}"
                 ::"r"(to), "l"(from), "r"((u32)inside) : "memory");
}
INLINE void nap(u32 nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds)); }
INLINE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
INLINE float load_now(const float* p) {  // not later, though it is needed later
    float f; asm volatile("ld.volatile.global.f32 %0, [%1];" : "=f"(f) : "l"(p) : "memory"); return f;
}
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
INLINE float add_lanes(float v, const int lanes) {  // over `lanes` neighbours
    #pragma unroll
    for (int i = 1; i < lanes; i *= 2) v += __shfl_xor_sync(~0u, v, i);
    return v;
}
// c[16, 8] += a[16, 32] b[32, 8] in integers: a of unsigned bytes, b of signed ones
INLINE void mma_bytes(int* c, const u32* a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
INLINE void mma_bytes_new(int* c, const u32* a, u32 b0, u32 b1) {  // c = a b
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}
INLINE float max_abs(float a, float b) {  // not a number where one of them is not
    float d; asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(fabsf(b))); return d;
}
INLINE u32 max_abs2(u32 a, u32 b) {  // the same for pairs
    u32 d; asm("{.reg .b32 t;\nabs." PAIR " t, %2;\nmax.NaN." PAIR " %0, %1, t;}" : "=r"(d) : "r"(a), "r"(b)); return d;
}
INLINE u32 fma2(u32 a, u32 b, u32 c) { u32 d; asm("fma.rn." PAIR " %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
INLINE u32 narrow2(float a, float b) {
    u32 d; asm("cvt.rn." PAIR ".f32 %0, %2, %1;" : "=r"(d) : "f"(a), "f"(b)); return d;
}
// Four of eight bytes, by four nibbles; one with its fourth bit set gives the sign of its byte eight times. (__byte_perm takes
// the fourth bits for zero.)
INLINE u32 select_bytes(u32 low, u32 high, u32 by) { u32 d; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(by)); return d; }
INLINE float high_half_float(u32 bits) { return __uint_as_float(__byte_perm(bits, 0x4b000000u, 0x7432)) - 8388608.f; }
INLINE void cluster_barrier() { asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory"); }
INLINE float load_rank(const float* here, u32 rank) {  // the same place in another block of the cluster
    u32 there;
    float v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
    return v;
}
INLINE u32 cluster_rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
INLINE u32 cluster_ranks() { u32 r; asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(r)); return r; }
