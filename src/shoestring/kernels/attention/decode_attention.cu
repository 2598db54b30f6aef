// Attention of requests with one row each, on sm_90 and later: head norm, rotary positions, the row's own key and value into
// their block, softmax(q keys^T) values. Defined in kernels/attention/decode_attention.py.
//
// A cluster of blocks takes one request and one key/value head; its blocks share the keys of earlier steps evenly. With a
// single request there is little work, so the kernel is built to hide latency:
//
//  - keys and values of earlier steps do not depend on the previous kernel: their first two stages, and the cosines and
//    sines, are loaded before grid_wait().
//  - the row's own key is not read back from memory: the softmax of the first block starts with it, rounded as in the cache.
//  - each block sends its sums to the block that writes them (distributed shared memory), one barrier of the cluster, and
//    every block joins the parts of its share of the outputs in the order of the blocks: nothing depends on timing.
//  - few registers and little shared memory, so that these blocks fit beside those of the previous kernel.
//
// MMA 1: the matrix units compute, though 4 heads fill half of their columns, because ordinary arithmetic does not keep up
// with the memory. A warp takes units of 16 keys, which lie in one block, through a ring of its own, and keeps a softmax of
// its own; the warps do not meet before the end.
//
// MMA 0, for other heads and blocks: a stage of 32 keys at a time. Scores: 4 lanes a key, 8 keys a warp. Softmax: a warp
// takes a head, a lane a key. Values: a thread takes two dims of all heads and every PARTS-th key. All sums are in fp32.
//
// Macros: D head dim (a multiple of 32, at most 256)   HEADS query heads to a key head (at most 16)   PAGE positions to a
//   block   HALF 0 bf16, 1 fp16   NORM 0 none, 1 weights in x's dtype, 2 in fp32   ROTATE 0 or 1   SPLIT blocks of a
//   cluster   BLOCKS that shall fit on a multiprocessor   WARPS of a block   MMA 0 or 1 (D 64 or 128, at most 8
//   heads, PAGE a multiple of 16)
#define THREADS (32 * WARPS)
#define KEYS 32
#define PIECES (D / 8)                                     // 16 bytes each
#define K_PITCH (2 * D + (2 * D % 128 == 64 ? 0 : 64))     // bytes between keys: two of them in different banks
#define STAGE (KEYS * (K_PITCH + 2 * D))
#define PAIRS ((D / 2 + 31) / 32)                          // halves' pairs of a lane
#define ITEMS ((HEADS + 1 + WARPS - 1) / WARPS)            // heads that a warp turns, the key's included
#define HEADS_OF ((HEADS + WARPS - 1) / WARPS)             // heads whose softmax a warp keeps
#define PARTS (THREADS / (D / 2))
#define PITCH ((HEADS + 3) / 4 * 4)                        // floats between the weights of two keys
#define SHARE (HEADS * D / SPLIT)                          // outputs that a block of the cluster writes
#define LEAST -1e30f
#define UNIT 16                                            // MMA: keys that a warp takes at once
#define RING 3                                             // MMA: units in a warp's ring
#define UNIT_BYTES (UNIT * 4 * D)                          // MMA: keys, then values

INLINE float other_lane(float v, int bit) { return __shfl_xor_sync(~0u, v, bit); }
INLINE float add_lanes(float v, const int lanes) {
    for (int bit = 1; bit < lanes; bit *= 2) v += other_lane(v, bit);
    return v;
}
INLINE void eight(float* f, const void* p) {
    const uint4 v = *(const uint4*)p;
    const u32 w[4] = {v.x, v.y, v.z, v.w};
    #pragma unroll
    for (int i = 0; i < 4; i++) f[2 * i] = widen_low(w[i]), f[2 * i + 1] = widen_high(w[i]);
}
INLINE float norm_weight(const void* weights, const int i) {
#if NORM == 2
    return ((const float*)weights)[i];
#else
    return widen(((const u16*)weights)[i]);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) decode_attention(
    const u16* qkv, u16* keys, u16* values, const int* __restrict__ tables, const int* __restrict__ tiles,
    const float* __restrict__ turns, const void* __restrict__ q_norm, const void* __restrict__ k_norm, u16* out, float eps,
    float scale, int table_stride, int groups, int window) {
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5, group = blockIdx.y;
    const int rank = cluster_rank();
    launch_dependents();
    const int* tile = tiles + 4 * blockIdx.z;
    const int* table = tables + (u64)tile[0] * table_stride;
    const int row = tile[1], position = tile[2];
    if (tile[3] == 0) {
        grid_wait();  // the next kernel relies on this one to wait
        return;
    }
#if MMA
    char* ring = smem + warp * RING * UNIT_BYTES;                 // of this warp; then its sums, [HEADS][D]
    u16* q_s = (u16*)(smem + WARPS * RING * UNIT_BYTES);          // [8][D], in 16 bits
    float* own_s = (float*)(q_s + 8 * D);                         // the row's key, then its value
    float* top_s = own_s + 2 * D;                                 // [WARPS + 1][HEADS][2] peaks and totals; the row's own
    float* box = top_s + 2 * (WARPS + 1) * HEADS;                 // [SPLIT][SHARE] sums sent here
#else
    char* stages = smem;                                          // two of them
    float* q_s = (float*)(smem + 2 * STAGE);                      // [HEADS][D], times the scale
    float* own_s = q_s + HEADS * D;                               // the row's key, then its value
    float* weight_s = own_s + 2 * D;                              // [KEYS][PITCH] scores, then weights
    float* shrink_s = weight_s + KEYS * PITCH;                    // [HEADS]
    float* box = shrink_s + HEADS;                                // [SPLIT][SHARE] sums sent here
#endif
    float* tops = box + HEADS * D;                                // [SPLIT][HEADS][2] peaks and totals sent here

    // ---- keys of earlier steps: [first, first + mine) are this block's ---------------------------------------------
    const int begin = window > 0 ? max(position - window + 1, 0) : 0, count = position - begin;
#if MMA
    // Units are aligned; keys before the window are left out as those behind the end are.
    const int early = begin % UNIT, all = count + early, size = (all + UNIT * SPLIT - 1) / (UNIT * SPLIT) * UNIT;
    const int first = begin - early + rank * size, mine = max(0, min(size, all - rank * size));
    const int units = (mine + UNIT - 1) / UNIT, fr = lane >> 2, fc = lane & 3;  // row and column of a fragment
    auto inside = [&](const int index) { return index < mine && first + index >= begin; };
    // 16-byte piece p of a key lies at p ^ key % 8, so that ldmatrix finds eight of them in different banks.
    auto place = [&](const int key, const int piece) { return key * 2 * D + (piece ^ (key & 7)) * 16; };
    auto fetch = [&](const int n) {  // the warp's n-th unit
        const int unit = warp + n * WARPS, at = first + unit * UNIT;
        if (unit < units) {
            const u64 base = (((u64)table[at / PAGE] * PAGE + at % PAGE) * groups + group) * D;
            const u32 to = shared_address(ring + n % RING * UNIT_BYTES);
            #pragma unroll
            for (int i = 0; i < UNIT * PIECES / 32; i++) {
                const int key = lane / PIECES + i * (32 / PIECES), piece = lane % PIECES;
                const u64 from = base + key * groups * D + piece * 8;
                copy_or_zero(to + place(key, piece), keys + from, inside(unit * UNIT + key));
                copy_or_zero(to + UNIT * 2 * D + place(key, piece), values + from, inside(unit * UNIT + key));
            }
        }
        commit();
    };
    for (int n = 0; n < RING - 1; n++) fetch(n);
#else
    const int size = (count + SPLIT - 1) / SPLIT, first = begin + rank * size;
    const int mine = max(0, min(size, count - rank * size));
    const int num_stages = (mine + KEYS - 1) / KEYS;
    auto fetch = [&](const int stage) {
        char* to = stages + (stage & 1) * STAGE;
        for (int c = t; c < KEYS * PIECES; c += THREADS) {
            const int key = c / PIECES, piece = c % PIECES, index = stage * KEYS + key;
            const bool inside = index < mine;
            const int at = first + (inside ? index : 0);
            const u64 from = (((u64)table[at / PAGE] * PAGE + at % PAGE) * groups + group) * D + piece * 8;
            copy_or_zero(to + key * K_PITCH + piece * 16, keys + from, inside);
            copy_or_zero(to + KEYS * K_PITCH + key * 2 * D + piece * 16, values + from, inside);
        }
    };
    for (int s = 0; s < 2; s++) {
        if (s < num_stages) fetch(s);
        commit();
    }
#endif
    float cosine[PAIRS], sine[PAIRS];
    #pragma unroll
    for (int n = 0; n < PAIRS; n++) {
        const int i = lane + 32 * n;
        cosine[n] = 1.f, sine[n] = 0.f;
        if (ROTATE && i < D / 2) cosine[n] = turns[(u64)position * D + i], sine[n] = turns[(u64)position * D + D / 2 + i];
    }
    const u64 own = (((u64)table[position / PAGE] * PAGE + position % PAGE) * groups + group) * D;
    if (SPLIT > 1) cluster_arrive();  // all blocks have started, so that sums can be sent to them
    grid_wait();

    // ---- q, and in the first block k and v -------------------------------------------------------------------------
    const u16* const base = qkv + (u64)row * ((HEADS + 2) * groups * D);
    const int items = rank ? HEADS : HEADS + 1;
#if MMA
    for (int i = HEADS * D + t; i < 8 * D; i += THREADS) q_s[i] = 0;  // no heads
#endif
    float a[ITEMS][PAIRS], b[ITEMS][PAIRS];
    #pragma unroll
    for (int n = 0; n < ITEMS; n++) {
        const int item = warp + n * WARPS;
        const u16* const from = base + (item < HEADS ? group * HEADS + item : groups * HEADS + group) * D;
        #pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            const int i = lane + 32 * p;
            const bool there = item < items && i < D / 2;
            a[n][p] = there ? widen(load_late16(from + i)) : 0.f;
            b[n][p] = there ? widen(load_late16(from + D / 2 + i)) : 0.f;
        }
    }
    if (rank == 0)
        for (int i = t; i < D; i += THREADS) {
            const u16 v = load_late16(base + (groups * (HEADS + 1) + group) * D + i);
            values[own + i] = v, own_s[D + i] = widen(v);
        }
    #pragma unroll
    for (int n = 0; n < ITEMS; n++) {
        const int item = warp + n * WARPS;
        const bool is_q = item < HEADS;
#if NORM
        float squares = 0.f;
        #pragma unroll
        for (int p = 0; p < PAIRS; p++) squares += a[n][p] * a[n][p] + b[n][p] * b[n][p];
        const float by = root(add_lanes(squares, 32) / D + eps);
#endif
        #pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            const int i = lane + 32 * p;
            if (item >= items || i >= D / 2) continue;
            float x = a[n][p], y = b[n][p];
#if NORM
            const void* const w = is_q ? q_norm : k_norm;
            x *= by * norm_weight(w, i), y *= by * norm_weight(w, D / 2 + i);
#endif
            const u16 left = narrow(x * cosine[p] - y * sine[p]), right = narrow(y * cosine[p] + x * sine[p]);
#if MMA
            if (is_q) q_s[item * D + i] = left, q_s[item * D + D / 2 + i] = right;
#else
            if (is_q) q_s[item * D + i] = widen(left) * scale, q_s[item * D + D / 2 + i] = widen(right) * scale;
#endif
            else {
                own_s[i] = widen(left), own_s[D / 2 + i] = widen(right);
                keys[own + i] = left, keys[own + D / 2 + i] = right;
            }
        }
    }
    __syncthreads();

#if MMA
    // ---- a warp's softmax of heads 2 fc and 2 fc + 1: the eight lanes of a column share it -----------------------------
    float peak[2] = {LEAST, LEAST}, total[2] = {}, acc[D / 16][4];
    #pragma unroll
    for (int d = 0; d < D / 16; d++)
        for (int e = 0; e < 4; e++) acc[d][e] = 0.f;
    u32 q[D / 16][2];
    #pragma unroll
    for (int d = 0; d < D / 16; d++)
        for (int i = 0; i < 2; i++) q[d][i] = *(const u32*)(q_s + fr * D + 16 * d + 8 * i + 2 * fc);
    for (int n = 0; warp + n * WARPS < units; n++) {
        wait_all_but<RING - 2>();
        __syncwarp();
        fetch(n + RING - 1);  // where the unit before was
        const u32 k_at = shared_address(ring + n % RING * UNIT_BYTES), v_at = k_at + UNIT * 2 * D;
        const int octet = lane >> 3, row = lane & 7;
        float score[4] = {};  // keys fr and fr + 8, two heads each
        #pragma unroll
        for (int d = 0; d < D / 16; d++) {
            u32 a[4];
            load_x(a, k_at + place(row + (octet & 1) * 8, 2 * d + (octet >> 1)));
            mma(score, a, q[d][0], q[d][1]);
        }
        float by[2];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            float top = peak[i];
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                float& s = score[2 * h + i];
                s = inside((warp + n * WARPS) * UNIT + h * 8 + fr) ? s * scale : LEAST, top = max(top, s);
            }
            for (int bit = 4; bit < 32; bit *= 2) top = max(top, other_lane(top, bit));
            by[i] = power2(peak[i] - top), total[i] *= by[i], peak[i] = top;
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                float& s = score[2 * h + i];
                s = s > LEAST ? power2(s - top) : 0.f, total[i] += s;
            }
        }
        const u32 b0 = transpose8(narrow2(score[0], score[1])), b1 = transpose8(narrow2(score[2], score[3]));
        #pragma unroll
        for (int d = 0; d < D / 16; d++) {
            u32 a[4];
            load_x_turned(a, v_at + place(row + (octet >> 1) * 8, 2 * d + (octet & 1)));
            #pragma unroll
            for (int e = 0; e < 4; e++) acc[d][e] *= by[e & 1];
            mma(acc[d], a, b0, b1);
        }
    }

    // ---- the warps of a block in order, the row's own key as the last ---------------------------------------------------
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        for (int bit = 4; bit < 32; bit *= 2) total[i] += other_lane(total[i], bit);
        const int head = 2 * fc + i;
        if (head < HEADS && fr == 0) top_s[(warp * HEADS + head) * 2] = peak[i], top_s[(warp * HEADS + head) * 2 + 1] = total[i];
    }
    wait_all_but<0>();
    __syncwarp();
    float* const part_s = (float*)ring;
    #pragma unroll
    for (int d = 0; d < D / 16; d++)
        for (int e = 0; e < 4; e++) {
            const int head = 2 * fc + (e & 1);
            if (head < HEADS) part_s[head * D + 16 * d + fr + 8 * (e >> 1)] = acc[d][e];
        }
    for (int h = warp; h < HEADS; h += WARPS) {
        float sum = 0.f;
        if (rank == 0)
            for (int i = lane; i < D; i += 32) sum += widen(q_s[h * D + i]) * own_s[i];
        sum = add_lanes(sum, 32);
        if (lane == 0) top_s[(WARPS * HEADS + h) * 2] = rank ? LEAST : sum * scale, top_s[(WARPS * HEADS + h) * 2 + 1] = rank ? 0.f : 1.f;
    }
    if (SPLIT > 1) cluster_wait();  // the one from before grid_wait
    __syncthreads();
    for (int e = t; e < HEADS * D; e += THREADS) {
        const int h = e / D;
        float top = LEAST, sum = 0.f, all = 0.f;
        #pragma unroll
        for (int p = 0; p <= WARPS; p++) top = max(top, top_s[(p * HEADS + h) * 2]);
        #pragma unroll
        for (int p = 0; p <= WARPS; p++) {
            const float shrink = power2(top_s[(p * HEADS + h) * 2] - top);
            const float value = p < WARPS ? ((const float*)(smem + p * RING * UNIT_BYTES))[e] : rank ? 0.f : own_s[D + e % D];
            sum += shrink * value, all += shrink * top_s[(p * HEADS + h) * 2 + 1];
        }
        if (SPLIT == 1) out[(u64)row * (HEADS * groups * D) + group * HEADS * D + e] = narrow(sum / all);
        else {
            store_rank(box + rank * SHARE + e % SHARE, e / SHARE, sum);
            for (int r = 0; e % D == 0 && r < SPLIT; r++) {
                store_rank(tops + (rank * HEADS + h) * 2, r, top);
                store_rank(tops + (rank * HEADS + h) * 2 + 1, r, all);
            }
        }
    }
    if (SPLIT == 1) return;
#else
    // ---- the softmax so far: peaks and totals in the warp that keeps a head, sums in the threads of two dims ---------
    float peak[HEADS_OF], total[HEADS_OF];
    #pragma unroll
    for (int n = 0; n < HEADS_OF; n++) {
        const int h = warp + n * WARPS;
        peak[n] = LEAST, total[n] = 0.f;
        if (rank == 0 && h < HEADS) {
            float sum = 0.f;
            for (int i = lane; i < D; i += 32) sum += q_s[h * D + i] * own_s[i];
            peak[n] = add_lanes(sum, 32), total[n] = 1.f;
        }
    }
    const int part = t / (D / 2), dim = t % (D / 2) * 2;
    float acc[HEADS][2];
    #pragma unroll
    for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < 2; i++) acc[h][i] = rank == 0 && part == 0 ? own_s[D + dim + i] : 0.f;

    for (int s = 0; s < num_stages; s++) {
        const char* const k_s = stages + (s & 1) * STAGE;
        const char* const v_s = k_s + KEYS * K_PITCH;
        wait_all_but<1>();
        __syncthreads();
        {
            const int key = warp * 8 + lane / 4, quarter = lane & 3;
            float score[HEADS];
            #pragma unroll
            for (int h = 0; h < HEADS; h++) score[h] = 0.f;
            #pragma unroll
            for (int j = 0; j < D / 32; j++) {
                const int piece = j * 4 + quarter;
                float k[8];
                eight(k, k_s + key * K_PITCH + piece * 16);
                #pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    const float4* const q = (const float4*)(q_s + h * D + piece * 8);
                    const float4 q0 = q[0], q1 = q[1];
                    score[h] += q0.x * k[0] + q0.y * k[1] + q0.z * k[2] + q0.w * k[3];
                    score[h] += q1.x * k[4] + q1.y * k[5] + q1.z * k[6] + q1.w * k[7];
                }
            }
            const bool inside = s * KEYS + key < mine;
            #pragma unroll
            for (int h = 0; h < HEADS; h++) {
                const float sum = add_lanes(score[h], 4);
                if (quarter == (h & 3)) weight_s[key * PITCH + h] = inside ? sum : LEAST;
            }
        }
        __syncthreads();
        #pragma unroll
        for (int n = 0; n < HEADS_OF; n++) {
            const int h = warp + n * WARPS;
            if (h >= HEADS) continue;
            const float score = weight_s[lane * PITCH + h];
            float top = max(peak[n], score);
            for (int bit = 1; bit < 32; bit *= 2) top = max(top, other_lane(top, bit));
            const float weight = score > LEAST ? power2(score - top) : 0.f, shrink = power2(peak[n] - top);
            total[n] = total[n] * shrink + add_lanes(weight, 32), peak[n] = top;
            weight_s[lane * PITCH + h] = weight;
            if (lane == 0) shrink_s[h] = shrink;
        }
        __syncthreads();
        if (part < PARTS) {
            #pragma unroll
            for (int h = 0; h < HEADS; h++) acc[h][0] *= shrink_s[h], acc[h][1] *= shrink_s[h];
            const int live = min(KEYS, mine - s * KEYS);
            #pragma unroll 4
            for (int key = part; key < live; key += PARTS) {
                const u32 v = *(const u32*)(v_s + key * 2 * D + dim * 2);
                const float v0 = widen_low(v), v1 = widen_high(v);
                #pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    const float weight = weight_s[key * PITCH + h];
                    acc[h][0] += weight * v0, acc[h][1] += weight * v1;
                }
            }
        }
        __syncthreads();
        if (s + 2 < num_stages) fetch(s + 2);
        commit();
    }

    // ---- the parts of a block, then those of the cluster, each in order ----------------------------------------------
    wait_all_but<0>();
    float* const red = (float*)stages;  // the stages are no longer needed
    if (part > 0 && part < PARTS)
        #pragma unroll
        for (int h = 0; h < HEADS; h++)
            for (int i = 0; i < 2; i++) red[((part - 1) * HEADS + h) * D + dim + i] = acc[h][i];
    if (SPLIT > 1) cluster_wait();  // the one from before grid_wait
    #pragma unroll
    for (int n = 0; n < HEADS_OF; n++) {
        const int h = warp + n * WARPS;
        if (h < HEADS && lane < SPLIT) {
            store_rank(tops + (rank * HEADS + h) * 2, lane, peak[n]);
            store_rank(tops + (rank * HEADS + h) * 2 + 1, lane, total[n]);
        }
    }
    __syncthreads();
    if (part == 0)
        #pragma unroll
        for (int h = 0; h < HEADS; h++)
            for (int i = 0; i < 2; i++) {
                float sum = acc[h][i];
                for (int p = 0; p + 1 < PARTS; p++) sum += red[(p * HEADS + h) * D + dim + i];
                const int e = h * D + dim + i;
                store_rank(box + rank * SHARE + e % SHARE, e / SHARE, sum);
            }
#endif
    if (SPLIT > 1) cluster_arrive(), cluster_wait();
    else __syncthreads();
    for (int e = t; e < SHARE; e += THREADS) {
        const int at = rank * SHARE + e, h = at / D;
        float top = LEAST, sum = 0.f, all = 0.f;
        #pragma unroll
        for (int r = 0; r < SPLIT; r++) top = max(top, tops[(r * HEADS + h) * 2]);
        #pragma unroll
        for (int r = 0; r < SPLIT; r++) {
            const float by = power2(tops[(r * HEADS + h) * 2] - top);
            sum += by * box[r * SHARE + e], all += by * tops[(r * HEADS + h) * 2 + 1];
        }
        out[(u64)row * (HEADS * groups * D) + group * HEADS * D + at] = narrow(sum / all);
    }
}
