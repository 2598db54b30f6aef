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
// A stage is 32 keys. Scores: 4 lanes a key, 8 keys a warp. Softmax: a warp takes a head, a lane a key. Values: a thread
// takes two dims of all heads and every PARTS-th key. All sums are in fp32, on the ordinary units: 4 heads do not fill a
// matrix instruction.
//
// Macros: D head dim (a multiple of 32, at most 256)   HEADS query heads to a key head (at most 16)   PAGE positions to a
//   block   HALF 0 bf16, 1 fp16   NORM 0 none, 1 weights in x's dtype, 2 in fp32   ROTATE 0 or 1   SPLIT blocks of a
//   cluster   BLOCKS that shall fit on a multiprocessor
#define THREADS 128
#define WARPS 4
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
    char* stages = smem;                                          // two of them
    float* q_s = (float*)(smem + 2 * STAGE);                      // [HEADS][D], times the scale
    float* own_s = q_s + HEADS * D;                               // the row's key, then its value
    float* weight_s = own_s + 2 * D;                              // [KEYS][PITCH] scores, then weights
    float* shrink_s = weight_s + KEYS * PITCH;                    // [HEADS]
    float* box = shrink_s + HEADS;                                // [SPLIT][SHARE] sums sent here
    float* tops = box + HEADS * D;                                // [SPLIT][HEADS][2] peaks and totals sent here

    // ---- keys of earlier steps: [first, first + mine) are this block's ---------------------------------------------
    const int begin = window > 0 ? max(position - window + 1, 0) : 0, count = position - begin;
    const int size = (count + SPLIT - 1) / SPLIT, first = begin + rank * size;
    const int mine = max(0, min(size, count - rank * size)), num_stages = (mine + KEYS - 1) / KEYS;
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
            if (is_q) q_s[item * D + i] = widen(left) * scale, q_s[item * D + D / 2 + i] = widen(right) * scale;
            else {
                own_s[i] = widen(left), own_s[D / 2 + i] = widen(right);
                keys[own + i] = left, keys[own + D / 2 + i] = right;
            }
        }
    }
    __syncthreads();

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
