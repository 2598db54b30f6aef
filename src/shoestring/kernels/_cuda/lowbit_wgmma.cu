// y[M, N] = x[M, K] @ w[N, K]^T for tens to thousands of rows M and weights of 2, 3 or 4 bits, on sm_90.
//
// Compiled behind lowbit_decode.cu and behind wgmma(), which kernels/lowbit_wgmma.py writes out for TN columns. Weights are operand A of wgmma m64nTNk16, decoded into
// registers: warp w of a warpgroup holds rows 16w..16w+15 in exactly the fragments of mma.m16n8k16, so the chunks of
// lowbit_layout.py serve as they are, four of them for 64 outputs. Activations are operand B, in shared memory.
//
//  - WGS warpgroups, 64 outputs each, share the activations of a block: boxes of 64 k x TN rows that one thread of
//    an extra warpgroup fetches with the copy engine (128-byte swizzle) into a ring of STAGES, guarded by mbarriers.
//  - every warp streams its own chunks through a ring of DEPTH, as in lowbit_few.cu, and decodes the next 16 STEPS k
//    (a second set of registers) while the tensor cores work on the last; other warpgroups fill the gaps.
//  - each weight is scaled before the product (one more rounding, as if the weight were stored in x's dtype).
//  - the SPLIT blocks of a cluster share K; their sums meet in distributed shared memory and are added in order.
//  - with SPLIT 1 a block goes on to the next tile, whose weights and activations are fetched meanwhile; sums leave
//    the registers straight to memory, transposed in blocks of 8 x 8.
//  - the grid may start while its predecessor drains: weights first, x only after griddepcontrol.wait.
//
// Tried and slower: weights through the copy engine as well (a fifth; one warp then fetches everything, and the loop has a
// fifth fewer instructions all the same), activations fetched once for two blocks (multicast; a third), K over
// the warpgroups of a block (no difference).
//
// More macros: TN rows of x in a block (a multiple of 8, at most 256)   WGS   STAGES   DEPTH   STEPS 2 or 4
//   SPLIT (every block of a cluster has at least one chunk)   BLOCKS on a multiprocessor
//   MORE registers of a thread that multiplies, 0: as many as all others
struct __align__(64) TensorMap { u64 opaque[16]; };

#define HALF_K 64                        // k of a stage: 128 bytes, one row of the swizzle
#define STAGE_BYTES (TN * 128)
#define OUTS (WGS * 64)
#define PITCH (OUTS + 4)                 // of the partial sums; 4: no bank conflicts
#define CONSUMERS (WGS * 4)              // warps
#define X_AT (LUT_BYTES + 1024)          // the kilobyte before it holds the barriers
#define RINGS_AT (X_AT + STAGES * STAGE_BYTES)

// ---- barriers and clusters -----------------------------------------------------------------------------------
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
INLINE u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
INLINE void cluster_sync() { asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory"); }
INLINE float4 load_from(const float* here, u32 rank) {
    float4 v;
    asm volatile("{.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [there];}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(shared_address(here)), "r"(rank) : "memory");
    return v;
}
INLINE void load_box(u32 to, const TensorMap* map, int k, int m, u32 bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(k), "r"(m), "r"(bar) : "memory");
}
INLINE void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
INLINE void sums_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS * 32) : "memory"); }  // those who multiply
template <int count> INLINE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count)); }
template <int count> INLINE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count)); }
INLINE u32 transpose8(u32 v) {  // pairs of an 8 x 8 matrix over a warp, row lane / 4, columns 2 (lane % 4) and the next
    u32 d; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(v)); return d;
}
INLINE u32 from_neighbour(u32 v) {
    u32 d; asm volatile("shfl.sync.bfly.b32 %0, %1, 1, 0x1f, 0xffffffff;" : "=r"(d) : "r"(v)); return d;
}
INLINE void let_successor_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// ---- wgmma ---------------------------------------------------------------------------------------------------
INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int groups> INLINE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory"); }
// K-major, 128-byte swizzle: rows of 128 bytes, groups of 8 rows 1024 bytes apart; 16 k further is 32 bytes further.
INLINE u64 descriptor(u32 address) {
    return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16 | (address >> 4 & 0x3fff);
}

extern "C" __global__ void __launch_bounds__(CONSUMERS * 32 + 128, BLOCKS) lowbit_wide(
    const char* __restrict__ W, const __grid_constant__ TensorMap X, u16* __restrict__ Y,
    const float* __restrict__ table, const u16* __restrict__ bias, int N, int M, int tiles, int chunks) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int rank = SPLIT > 1 ? cluster_rank() : 0;
    const int across = (tiles + CONSUMERS - 1) / CONSUMERS, items = across * ((M + TN - 1) / TN);
    const int share = (chunks + SPLIT - 1) / SPLIT, first = min(chunks, rank * share), count = min(chunks - first, share);
    const u32 full = shared_address(smem) + LUT_BYTES, empty = full + 8 * STAGES;  // barriers
    const u32 x_at = shared_address(smem) + X_AT;

    // ---- weights: DEPTH - 1 chunks ahead, past the end of a tile into the next -------------------------------
    char* const ring = smem + RINGS_AT + warp * DEPTH * CHUNK;
    auto chunks_of = [&](const int item) {
        const int tile = item % across * CONSUMERS + warp;  // past the end: the last, and nothing is written
        return W + ((u64)min(tile, tiles - 1) * chunks + first) * CHUNK + lane * 16;
    };
    int next_item = blockIdx.y, next_chunk = 0;
    const char* next = chunks_of(next_item);
    auto fetch = [&](const int slot) {  // always commits, so that groups can be counted
        if (next_item < items) {
            const u32 to = shared_address(ring) + slot * CHUNK + lane * 16;
            #pragma unroll
            for (int p = 0; p < CHUNK / 16; p += 32)
                if (p + lane < CHUNK / 16) copy_async(to + p * 16, next + p * 16);
            next += CHUNK;
            if (++next_chunk == count) next_chunk = 0, next_item += gridDim.y, next = chunks_of(next_item);
        }
        commit();
    };
    if (warp < CONSUMERS)
        for (int p = 0; p < DEPTH - 1; p++) fetch(p);
    let_successor_start();
    if (threadIdx.x == CONSUMERS * 32) {
        for (int s = 0; s < STAGES; s++) bar_init(full + 8 * s, 1), bar_init(empty + 8 * s, CONSUMERS);
        bar_init_done();
    }
#if TABLE
    for (int e = warp; e < 1 << (2 * BITS); e += CONSUMERS + 4)
        *(u32*)(smem + e * 128 + lane * 4) = narrow(table[e & ((1 << BITS) - 1)]) | (u32)narrow(table[e >> BITS]) << 16;
    const char* lane_lut = smem + lane * 4;
#else
    const u32 magic = magic_register();
#endif
    __syncthreads();

    if (warp >= CONSUMERS) {  // ---- x -----------------------------------------------------------------------
        if (MORE) fewer_registers<24>();
        if (warp == CONSUMERS && lane == 0) {
            wait_for_predecessor();
            int stage = 0, turn = 1;
            for (int item = blockIdx.y; item < items; item += gridDim.y)
                for (int u = 0; u < 2 * count; u++) {
                    bar_wait(empty + 8 * stage, turn);
                    bar_expect(full + 8 * stage, STAGE_BYTES);
                    load_box(x_at + stage * STAGE_BYTES, &X, first * 128 + u * HALF_K, item / across * TN, full + 8 * stage);
                    if (++stage == STAGES) stage = 0, turn ^= 1;
                }
        }
        __syncwarp();
        if (SPLIT > 1) cluster_sync(), cluster_sync();
    } else {
        if (MORE) more_registers<MORE ? MORE : 24>();
        auto release = [&](const int stage) {
            if (lane == 0) bar_arrive(empty + 8 * stage);
        };
        int stage = 0, slot = 0;
        u32 turn = 0;
        for (int item = blockIdx.y; item < items; item += gridDim.y) {
            const int tile0 = item % across * CONSUMERS, m0 = item / across * TN;
            float acc[TN / 2];
            #pragma unroll
            for (int e = 0; e < TN / 2; e++) acc[e] = 0.f;
            u32 a[2][4 * STEPS];
            int before = -1;
            for (int i = 0; i < count; i++) {
                wait_all_but<DEPTH - 2>();
                __syncwarp();  // chunk i is here, and chunk i - 1 has been read by all lanes
                fetch(slot ? slot - 1 : DEPTH - 1);
                const char* chunk = ring + slot * CHUNK;
                if (++slot == DEPTH) slot = 0;
                u32 w[NW], up[2], down[2], zero[2];
                load_words(w, chunk, lane);
                #pragma unroll
                for (int h = 0; h < 8 / STEPS; h++) {
                    #pragma unroll
                    for (int s = 0; s < STEPS; s++) {
                        const int j = STEPS * h + s;
                        if (j % SPG == 0) {
                            #pragma unroll
                            for (int r = 0; r < 2; r++) {
                                const u32 grid = *(const u32*)(chunk + CODES + j / SPG * 64 + g * 4 + r * 32);
                                up[r] = both_narrow(scale_float(grid));
                                down[r] = TWO ? both_narrow(-scale_float(grid >> 16)) : 0;
                                zero[r] = TABLE ? 0 : both((grid >> 16) * (r ? RS : 1) + MAGIC16);
                            }
                        }
                        u32* f = a[h & 1] + 4 * s;
#if TABLE
                        decode(f, w, j, lane_lut);
#else
                        decode(f, w, j, magic);
#endif
                        #pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const u32 v = TABLE ? f[e] : sub2(f[e], zero[e & 1]);
                            // two scales: one of the two products is 0, so their difference is exact
                            f[e] = TWO ? sub2(mul_relu2(v, up[e & 1]), mul_relu2(v, down[e & 1])) : mul2(v, up[e & 1]);
                        }
                    }
                    const bool opens = h * STEPS % 4 == 0;
                    if (opens) bar_wait(full + 8 * stage, turn);
                    wgmma_fence();
                    const u64 box = descriptor(x_at + stage * STAGE_BYTES) + h * STEPS % 4 * 2;
                    #pragma unroll
                    for (int s = 0; s < STEPS; s++) wgmma(acc, a[h & 1] + 4 * s, box + 2 * s);
                    wgmma_commit();
                    wgmma_wait<1>();  // the products before these are done: their registers are free, and so may be their box
                    if (opens) {
                        if (before >= 0) release(before);
                        before = stage;
                    }
                    if ((h + 1) * STEPS % 4 == 0 && ++stage == STAGES) stage = 0, turn ^= 1;
                }
            }
            wgmma_wait<0>();
            release(before);
            wait_for_predecessor();
            const int cols = min(TN, M - m0);
#if SPLIT == 1
            // ---- sums to memory: 16 outputs of 8 rows at a time, 32 bytes each ---------------------------------------
            const int out = (tile0 + warp) * 16;
            if (out >= N) continue;
            const float b0 = bias ? widen(bias[out + g]) : 0.f, b1 = bias ? widen(bias[out + g + 8]) : 0.f;
            #pragma unroll
            for (int e = 0; e < TN / 2; e += 4) {
                const u32 low = transpose8(narrow(acc[e] + b0) | (u32)narrow(acc[e + 1] + b0) << 16);
                const u32 high = transpose8(narrow(acc[e + 2] * (1.f / RS) + b1) | (u32)narrow(acc[e + 3] * (1.f / RS) + b1) << 16);
                const u32 other = from_neighbour(t & 1 ? low : high);  // even lanes store outputs 0..7, odd ones 8..15
                uint2 four;
                four.x = t & 1 ? other : low, four.y = t & 1 ? high : other;
                if (e * 2 + g < cols) *(uint2*)(Y + (u64)(m0 + e * 2 + g) * N + out + (t & 1) * 8 + (t >> 1) * 4) = four;
            }
#else
            // ---- sums over the cluster, in order -------------------------------------------------------------------
            sums_sync();
            float* const part = (float*)(smem + X_AT);  // over x and the rings, which nobody needs any more
            const int row = warp * 16 + g, threads = CONSUMERS * 32;
            #pragma unroll
            for (int e = 0; e < TN / 2; e++) {
                const int col = e / 4 * 8 + t * 2 + (e & 1);
                part[col * PITCH + row + (e & 2 ? 8 : 0)] = acc[e] * (e & 2 ? 1.f / RS : 1.f);
            }
            cluster_sync();
            for (int e = rank * threads + threadIdx.x; e < cols * (OUTS / 4); e += SPLIT * threads) {
                const int col = e / (OUTS / 4), at = e % (OUTS / 4) * 4, out = tile0 * 16 + at;
                if (out >= N) continue;
                float4 v[SPLIT];
                #pragma unroll
                for (int p = 0; p < SPLIT; p++) v[p] = load_from(part + col * PITCH + at, p);
                #pragma unroll
                for (int p = 1; p < SPLIT; p++) v[0].x += v[p].x, v[0].y += v[p].y, v[0].z += v[p].z, v[0].w += v[p].w;
                if (bias) {
                    v[0].x += widen(bias[out]), v[0].y += widen(bias[out + 1]);
                    v[0].z += widen(bias[out + 2]), v[0].w += widen(bias[out + 3]);
                }
                uint2 packed;
                packed.x = narrow(v[0].x) | (u32)narrow(v[0].y) << 16, packed.y = narrow(v[0].z) | (u32)narrow(v[0].w) << 16;
                *(uint2*)(Y + (u64)(m0 + col) * N + out) = packed;
            }
#endif
        }
        if (SPLIT > 1) cluster_sync();  // nobody leaves while its sums are read
    }
}
