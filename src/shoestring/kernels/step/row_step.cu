// All layers of a decoder and its head for one row, in one kernel, on sm_90 and later: from the embedded token to logits.
// Defined in kernels/step/row_step.py.
//
// Between two kernels the memory waits. Here it does not: every block stays on its multiprocessor, and every warp reads its
// share of all weights of all layers, in order, through a ring in shared memory. More warps ask for them: a slot is filled
// again once it was used, with a piece of whatever product comes next, so that the weights of the next product arrive while the
// block still waits for its input. Another one asks for keys and values.
//
//  - a product's rows (outputs) are shared out over the blocks, the inputs of a row over `slices` warps of a block.
//  - activations pass through memory, as words of two numbers and a tag that says which step and layer wrote them: who needs
//    a word reads it until the tag is right. There is no barrier over the grid, no counter and no fence.
//  - the residual stream stays in the registers of the threads that write it: products that add to it have equal shares.
//  - attention: a block takes a key head, or with few keys a query head, and a share of the keys; the shares of a head are
//    joined by the blocks that made them, each a part of the dims, in a fixed order. Old keys and values are asked for before
//    q is there.
//  - sums have a fixed order: the result does not depend on timing.
//  - CHUNKED: weights of 2, 3 or 4 bits with integer grids in chunks of 16 rows by 128 inputs (kernels/lowbit/chunk_layout.py),
//    against x in 8-bit digits as in lowbit/few_rows.cu. (Compiled behind lowbit/decode.cu and lowbit/digits.cu then.)
//
// A word is written again two layers later. Who writes it then has seen words that depend on all who read it before.
//
// Macros: D_MODEL D_FF HEADS GROUPS (key heads) DIM (of a head) VOCAB   PAGE positions to a block of keys   BLOCKS of the
//   grid   WARPS that multiply   SLOTS of a warp's ring, SLOT bytes each   FLIGHT bytes of a ring that are on their way at once
//   SLICE inputs of a row for a warp, at most (CODED_SLICE: of 8-bit codes)   SPLITS shares of
//   the keys, at most   SHARE_KEYS keys that are worth a share   SHORT_KEYS up to which a block takes one query head
//   EARLY_KEYS of a block, of more than those, are asked for before the layer begins
//   HEAD 1: with the head, of dense weights; 2: of 8-bit codes with a scale (HEAD_SCALE16: bf16) and a zero for each row;
//   0: the residual stream is the result   HEAD_NORM 0 or 1   NORM32, HEAD_NORM32 1: norm weights in fp32
//   CHUNKED: RUN chunks of a piece   PIECES_AHEAD 1: read the next piece before one is multiplied   LOG_MODEL, LOG_ATTENDED,
//   LOG_INNER of the warps that share rows of D_MODEL, ATTENDED and D_FF inputs
//   FILLERS warps that ask for weights, 1 or 2   QUADS times four inputs that a thread takes at once, at most
//   WATCHED inputs from which on one warp looks for them first   SPIN nanoseconds between two looks at a word
//   STAMPS 1: write times
#define THREADS (WARPS * 32)
#define QKV ((HEADS + 2 * GROUPS) * DIM)
#define ATTENDED (HEADS * DIM)
#define SHARED (HEADS / GROUPS)          // query heads to a key head
#define LANES (DIM / 8)                  // lanes of a key, 16 bytes each
#define KEYS_OF (32 / LANES)             // keys that a warp takes at a time
#define KEYS_AHEAD 8                     // pieces of keys and values that a thread asks for before q is there; more would spill
#define LEAST -1e30f
#define GIVE_UP (1 << 22)                // reads of a word that does not come; a second or more

enum Kind { Qkv, Output, Up, Down, Head };
template <int K> struct Part { static constexpr int kind = K; };  // each has instructions of its own; and so has a number of rows
constexpr int inputs_of(int kind) { return kind == Output ? ATTENDED : kind == Down ? D_FF : D_MODEL; }
constexpr int outputs_of(int kind) { return kind == Qkv ? QKV : kind == Up ? D_FF : kind == Head ? VOCAB : D_MODEL; }
constexpr bool chunked(int kind) { return CHUNKED && kind != Head; }
constexpr bool coded(int kind) { return HEAD == 2 && kind == Head; }  // bytes w = (code - zero) * scale
constexpr int chunks_of(int kind) { return (inputs_of(kind) + 127) / 128; }
constexpr bool has_norm(int kind) { return kind == Qkv || kind == Up || kind == Head; }
constexpr int rows_of(int kind) { return chunked(kind) ? 16 : 2; }  // outputs that stay together
constexpr int log_slices(int kind) {  // of the number of warps that share a row, or 16 rows
#if CHUNKED
    if (kind != Head) return kind == Output ? LOG_ATTENDED : kind == Down ? LOG_INNER : LOG_MODEL;
#endif
    int log = 0;
    while (inputs_of(kind) > (coded(kind) ? CODED_SLICE : SLICE) << log) log++;
    return log;
}
INLINE int slices_log(const int kind) {
    return kind == Down ? log_slices(Down) : kind == Output ? log_slices(Output) : kind == Head ? log_slices(Head) : log_slices(Up);
}
static_assert(log_slices(Qkv) == log_slices(Up), "products of equal inputs");
constexpr int part_of(int kind) { return inputs_of(kind) >> log_slices(kind); }

struct Layer {  // as row_step.py writes it
    const u16 *weights[4], *biases[4];
    const void *attn_norm, *mlp_norm, *q_norm, *k_norm;
    u16 *keys, *values;
    const float* turns;  // cosines and sines at every position; null: no rotation
    u64 window;          // positions that the row sees; 0: all
};

// Words of a layer, in memory.
#define QKV_AT 0
#define ATTENDED_AT (QKV_AT + QKV / 2)
#define MIDDLE_AT (ATTENDED_AT + ATTENDED / 2)
#define GATED_AT (MIDDLE_AT + D_MODEL / 2)
#define LAST_AT (GATED_AT + D_FF / 2)
#define PARTS_AT (LAST_AT + D_MODEL / 2)                   // [HEADS][SPLITS][DIM] numbers in fp32, or of some heads together
#define TOPS_AT (PARTS_AT + GROUPS * SPLITS * SHARED * DIM)  // [HEADS][SPLITS][2] peaks and totals
#define WORDS (TOPS_AT + GROUPS * SPLITS * SHARED * 2)

// Shared memory. Attention uses what products have for x and their sums.
#define RINGS (WARPS * SLOTS * SLOT)
constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int least(int a, int b) { return a < b ? a : b; }
// The queries, which are written while other warps may still read a product's sums, are no longer than x.
constexpr int WIDEST = most(D_FF, most(D_MODEL, ATTENDED));
#if CHUNKED
#define X_GROUP 144   // bytes of 64 inputs: their high digits, their low ones, and 16 against bank conflicts
#define X_SUMS ((WIDEST + 127) / 128 * 2 * X_GROUP)  // behind them: sums by group, and what a digit is worth
constexpr int X_BYTES = most(X_SUMS + (WIDEST + 127) / 128 * NG * 8, 4 * (SHARED + 2) * DIM);
#else
constexpr int X_BYTES = most(2 * WIDEST, 4 * (SHARED + 2) * DIM);
#endif

INLINE float add_lanes(float v, const int lanes) {
    #pragma unroll
    for (int i = 1; i < lanes; i *= 2) v += __shfl_xor_sync(~0u, v, i);
    return v;
}
INLINE void eight(float* f, const uint4 v) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
    #pragma unroll
    for (int i = 0; i < 4; i++) f[2 * i] = widen_low(w[i]), f[2 * i + 1] = widen_high(w[i]);
}
INLINE void look_again(const int tries) {
    if (tries == GIVE_UP) abandon();
    others_run();
    if (SPIN) nap(SPIN);
}
INLINE bool is_late(const uint4 v, const u32 tag) { return v.y != tag || v.w != tag; }  // one of two neighbours

// ---- the stream of weights ------------------------------------------------------------------------------------------
struct Share { int first, count; };  // outputs of this block
INLINE Share share_of(const int kind) {
    const u32 each = rows_of(kind), all = outputs_of(kind) / each;
    const u32 first = blockIdx.x * all / BLOCKS, next = (blockIdx.x + 1) * all / BLOCKS;
    return {(int)(first * each), (int)((next - first) * each)};
}
// What a warp reads next, asked for by a lane of the warp behind those that multiply. A row is one output, or 16 with their chunks.
struct Stream {
    const Layer* layers;
    const void* head;
    int num_layers, warp;
    int layer, kind;
    int row, rows, apart, half;  // `half`: from there on rows of the second matrix
    int chunk, chunks, bytes;
    const char* next;
    u64 policy, to_row, to_second;  // bytes from behind a row to the next, and to the second matrix
    u32 to_chunk;

    INLINE void enter() {  // this product, or the next that has rows for this warp
        while (layer <= num_layers) {
            const int log = slices_log(kind), slices = 1 << log, slice = warp & (slices - 1);
            const Share mine = share_of(kind);
            const int count = chunked(kind) ? mine.count / 16 : mine.count;
            rows = kind == Up ? 2 * count : count, half = count, row = warp >> log, apart = WARPS >> log, chunk = 0;
            u32 pitch = inputs_of(kind) * (coded(kind) ? 1 : 2), first = mine.first;
            bytes = (int)pitch >> log, chunks = 1, to_chunk = 0;
#if CHUNKED
            if (chunked(kind)) {
                const int all = chunks_of(kind);
                bytes = RUN * CHUNK, pitch = all * CHUNK, first /= 16;
                chunks = (all / RUN - slice + slices - 1) >> log, to_chunk = slices * bytes;
            }
#endif
            next = kind == Head ? (const char*)head : (const char*)layers[layer].weights[kind & 3];
            next += (u64)(first + row) * pitch + slice * bytes;
            to_row = (u64)apart * pitch - chunks * to_chunk;
            to_second = (u64)(D_FF / (chunked(kind) ? 16 : 1) - count) * pitch;
            if (kind == Up && row >= half) next += to_second;
            if (row < rows) return;
            next_product();
        }
    }
    INLINE void next_product() {
        if (kind == Head) layer = num_layers + 1;
        else if (kind == Down) layer++, kind = Qkv;
        else kind++;
        if (layer == num_layers && HEAD) kind = Head;
        else if (layer == num_layers) layer++;
    }
    INLINE void ask(const u32 to, const u32 bar) {  // for the next piece
        bar_expect(bar, bytes);
        bulk_copy_by(to, next, bytes, bar, policy);
        next += to_chunk;
        if (++chunk < chunks) return;
        chunk = 0, next += to_row;
        const bool was_first = row < half;
        row += apart;
        if (row >= rows) {
            next_product();
            enter();
        } else if (was_first && row >= half) next += to_second;
    }
};
// One warp or two fill the rings, each lane that of one warp that multiplies: a slot has a barrier that it is full and one that
// it is free. No more than FLIGHT bytes of a ring (and a piece) are on their way at once: more would not come sooner, and the words
// that blocks exchange would wait behind them in the same queues.
INLINE void fill_rings(const Layer* layers, const void* head, const int num_layers, const int first_ring, const int lane, const u32 rings, const u32 bars) {
    Stream stream;
    const int warp = min(first_ring + lane, WARPS - 1);
    const u32 ring = rings + warp * SLOTS * SLOT, full = bars + warp * SLOTS * 16;
    stream.layers = layers, stream.head = head, stream.num_layers = num_layers, stream.warp = warp;
    stream.policy = read_once(), stream.layer = 0, stream.kind = Qkv;
    stream.enter();
    int slot = 0, phase = 1, first = 0, first_phase = 0, flying = 0;  // the next slot; the first of those that are on their way
    bool more = lane < WARPS / FILLERS && stream.layer <= num_layers;
    while (__any_sync(~0u, more)) {
        if (more) {
            if (flying > 0 && bar_is_past(full + first * 8, first_phase)) {
                flying--;
                if (++first == SLOTS) first = 0, first_phase ^= 1;
            }
            if (flying < SLOTS && flying * stream.bytes < FLIGHT && bar_is_past(full + (SLOTS + slot) * 8, phase)) {
                stream.ask(ring + slot * SLOT, full + slot * 8);
                flying++;
                if (++slot == SLOTS) slot = 0, phase ^= 1;
                more = stream.layer <= num_layers;
            }
        }
        others_run();
        __syncwarp();
    }
}
struct Ring {  // of a warp
    u32 full;  // barriers: slots are full, then: they are free
    int slot, phase;
    INLINE u32 await() {  // the next piece: its place
        bar_wait(full + slot * 8, phase);
        return slot * SLOT;
    }
    INLINE void free(const int lane) {  // its slot, after all lanes have read it
        __syncwarp();
        if (lane == 0) bar_arrive(full + (SLOTS + slot) * 8);
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
};
INLINE void meet() { threads_meet<1>(THREADS); }  // the warps that multiply

#if STAMPS
#define STAMP(n) if (threadIdx.x == 0) stamps[n] = time_now()
#else
#define STAMP(n)
#endif

// What all parts of the kernel need.
struct Step {
    Ring slots;         // of this warp
    char* ring;
    u32* x_s;           // the input of a product, two numbers to a word
    float* squares;     // [WARPS]
    float* inputs;      // [WARPS] sums of x by slices, for 8-bit codes
    float* part;        // sums of rows by slices
    int warp, lane;
    float eps;
    const struct Keys* keys;  // of layers without a window
    u32* places;        // [THREADS][KEYS_AHEAD] where the first keys of a query head lie, in layers without a window
    const u16* head_scale;
    const unsigned char* head_zero;
    u64* stamps;        // of this block and product: asked, input here, multiplied, written
};

// ---- a product --------------------------------------------------------------------------------------------------------
// Until words all over the input are here; so that the other warps do not read in vain, where there are many.
INLINE void watch(const Step& s, const uint2* in, const u32 tag, const int width) {
    const uint2* const some = in + s.lane * (width / 4 - 1) / 31 * 2;
    if (s.warp == 0)
        for (int tries = 0; is_late(load_now4(some), tag); tries++) look_again(tries);
    meet();
}
INLINE float square_of(const u32 pair) { return widen_low(pair) * widen_low(pair) + widen_high(pair) * widen_high(pair); }

// Times 4 inputs that a thread takes at once, of so many: up to QUADS, as even as can be.
constexpr int taken_of(int quads) {
    const int each = (quads + THREADS - 1) / THREADS, rounds = (each + QUADS - 1) / QUADS;
    return (each + rounds - 1) / rounds;
}
// Four inputs at a time, from words of this tag or `plain` numbers, to where `store` puts them; and the sum of their squares.
// A thread asks for all of its words of a round at once, and again for all that were not there; those of a warp lie side by side,
// and those of the next round are asked for before. ALL: with zeros behind them. `ahead` loads what belongs to inputs while they
// are on their way.
template <int COUNT, int ALL, bool NORMED, class Ahead, class Store>
INLINE void take_inputs(Step& s, const uint2* in, const u16* plain, const u32 tag, Ahead ahead, Store store) {
    constexpr int taken = taken_of(ALL);
    if (COUNT * 4 >= WATCHED && !plain) watch(s, in, tag, COUNT * 4);
    float square = 0.f;
    uint4 next[taken];
    auto ask = [&](uint4* got, const int e) {
        #pragma unroll
        for (int u = 0; u < taken; u++)
            if (is_late(got[u], tag)) got[u] = load_now4(in + 2 * (e + u * THREADS));
    };
    auto ask_first = [&](const int e) {
        #pragma unroll
        for (int u = 0; u < taken; u++) {
            const int q = e + u * THREADS;
            const u32 at_first = q < COUNT && !plain ? ~tag : tag;
            const uint2 x = q < COUNT && plain ? load_now2(plain + 4 * q) : make_uint2(0, 0);
            next[u] = make_uint4(x.x, at_first, x.y, at_first);
        }
        ask(next, e);
    };
    ask_first(threadIdx.x);
    #pragma unroll 1
    for (int first = 0; first < ALL; first += THREADS * taken) {  // the same number of times for every thread
        const int e = first + threadIdx.x;
        uint4 got[taken];
        #pragma unroll
        for (int u = 0; u < taken; u++) got[u] = next[u];
        if (taken * THREADS < ALL) ask_first(e + THREADS * taken);
        ahead(e);
        for (int tries = 0;; tries++) {
            bool late = false;
            #pragma unroll
            for (int u = 0; u < taken; u++) late |= is_late(got[u], tag);
            if (!__any_sync(~0u, late)) break;
            look_again(tries);
            ask(got, e);
        }
        uint2 x[taken];
        #pragma unroll
        for (int u = 0; u < taken; u++) {
            x[u] = make_uint2(got[u].x, got[u].z);
            if (NORMED) square += square_of(x[u].x) + square_of(x[u].y);
        }
        store(e, x);
    }
    if (!NORMED) return;
    square = add_lanes(square, 32);
    if (s.lane == 0) s.squares[s.warp] = square;
}

// part[slice * rows + row] = the sums of all rows of this block's share, with x from words of this tag or `plain` numbers.
template <int kind> INLINE void multiply_dense(Step& s, const uint2* in, const u16* plain, const u32 tag, const void* norm,
                                               const int rows, u64* const stamps) {
    constexpr bool bytes = coded(kind), normed = has_norm(kind);
    constexpr int width = inputs_of(kind), log = log_slices(kind), slices = 1 << log, part = part_of(kind), quads = width / 4;
    constexpr int each = bytes ? 16 : 8, pieces = (part + 32 * each - 1) / (32 * each);  // of 16 bytes, of a lane
    constexpr int norm_words = each / 2 * (1 + NORM32);
    static_assert(pieces * (CHUNKED ? 1 : 512) <= SLOT && part * 16 / each <= SLOT, "slots are too small");
    const int slice = s.warp & (slices - 1);
    u32 by[pieces][norm_words];  // weights of the norm, which no block writes, or ones: without branches, as the rows below
    auto load_norm = [&](int) {
        constexpr u32 one = NORM32 ? 0x3f800000 : HALF ? 0x3c003c00 : 0x3f803f80;
        #pragma unroll
        for (int p = 0; p < pieces; p++)
            #pragma unroll
            for (int i = 0; i < norm_words; i += 4) {
                uint4 v = make_uint4(one, one, one, one);
                const int at = (p * 32 + s.lane) * each;
                if (normed && at < part) v = *(const uint4*)((const char*)norm + (slice * part + at) * (2 + 2 * NORM32) + i * 4);
                by[p][i] = v.x, by[p][i + 1] = v.y, by[p][i + 2] = v.z, by[p][i + 3] = v.w;
            }
    };
    take_inputs<quads, quads, normed>(s, in, plain, tag, load_norm, [&](const int e, const uint2* x) {
        #pragma unroll
        for (int u = 0; u < taken_of(quads); u++)
            if (e + u * THREADS < quads) *(uint2*)(s.x_s + 2 * (e + u * THREADS)) = x[u];
    });
    meet();
    STAMP(1);
    float x[pieces][8], inputs = 0.f;
#if CHUNKED && HEAD == 2
    // 16 inputs as integers times a scale, in two digits of 8 bits: four codes an instruction.
    u32 high[pieces][4], low[pieces][4];
    float unit[pieces];
#endif
    #pragma unroll
    for (int p = 0; p < pieces; p++) {
        const int at = (p * 32 + s.lane) * each;
        float some[each];
        #pragma unroll
        for (int i = 0; i < each; i += 8) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (at < part) v = *(const uint4*)(s.x_s + (slice * part + at + i) / 2);
            eight(some + i, v);
        }
        #pragma unroll
        for (int i = 0; i < each; i++) {
            const u32 word = by[p][i * norm_words / each];
            some[i] *= NORM32 ? __uint_as_float(word) : i % 2 ? widen_high(word) : widen_low(word);
        }
#if CHUNKED && HEAD == 2
        u32 pairs[8], top = 0;
        #pragma unroll
        for (int i = 0; i < 8; i++) pairs[i] = narrow2(some[2 * i], some[2 * i + 1]), top = max_abs2(top, pairs[i]);
        const Digits digits(top);
        int sum_high = 0, sum_low = 0;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            digits.split(pairs[2 * i], pairs[2 * i + 1], high[p][i], low[p][i]);
            high[p][i] = __byte_perm(high[p][i], 0, 0x3120), low[p][i] = __byte_perm(low[p][i], 0, 0x3120);  // in order
            sum_high = __dp4a((int)high[p][i], 0x01010101, sum_high), sum_low = __dp4a((int)low[p][i], 0x01010101, sum_low);
        }
        unit[p] = digits.unit, inputs += ((float)sum_high + (float)sum_low * (1.f / LOW_UNITS)) * unit[p];
#else
        #pragma unroll
        for (int i = 0; i < 8; i++) x[p][i] = some[i];
#endif
    }
    if (bytes) {
        inputs = add_lanes(inputs, 32);
        if (s.lane == 0 && s.warp < slices) s.inputs[slice] = inputs;
    }
    auto multiply_rows = [&](const int row, auto together) {
        constexpr int num = decltype(together)::kind;
        // All loads first, without branches: one must not wait for the sums of another. What lies behind a shorter piece is
        // older weights or zeros, and x is 0 there.
        uint4 got[num][pieces];
        #pragma unroll
        for (int r = 0; r < num; r++) {
            const char* const piece = s.ring + s.slots.await();
            #pragma unroll
            for (int p = 0; p < pieces; p++) {
                got[r][p] = make_uint4(0, 0, 0, 0);
                if (!CHUNKED || (p * 32 + s.lane) * each < part) got[r][p] = *(const uint4*)(piece + (p * 32 + s.lane) * 16);
            }
            s.slots.free(s.lane);
        }
        float sum[num][pieces];
        #pragma unroll
        for (int r = 0; r < num; r++)
            #pragma unroll
            for (int p = 0; p < pieces; p++) {
                sum[r][p] = 0.f;
#if CHUNKED && HEAD == 2
                const u32 words[4] = {got[r][p].x, got[r][p].y, got[r][p].z, got[r][p].w};
                int sum_high = 0, sum_low = 0;
                #pragma unroll
                for (int i = 0; i < 4; i++) {  // codes less 128
                    const int codes = (int)(words[i] ^ 0x80808080u);
                    sum_high = __dp4a(codes, (int)high[p][i], sum_high), sum_low = __dp4a(codes, (int)low[p][i], sum_low);
                }
                sum[r][p] = ((float)sum_high + (float)sum_low * (1.f / LOW_UNITS)) * unit[p];
#else
                float w[8];
                eight(w, got[r][p]);
                #pragma unroll
                for (int i = 0; i < 8; i++) sum[r][p] += w[i] * x[p][i];
#endif
            }
        #pragma unroll
        for (int apart = 1; apart < pieces; apart *= 2)
            #pragma unroll
            for (int n = 0; n < num * pieces; n++)
                if (n % pieces % (2 * apart) == 0 && n % pieces + apart < pieces) sum[n / pieces][n % pieces] += sum[n / pieces][n % pieces + apart];
        #pragma unroll
        for (int i = 1; i < 32; i *= 2)
            #pragma unroll
            for (int r = 0; r < num; r++) sum[r][0] += __shfl_xor_sync(~0u, sum[r][0], i);
        #pragma unroll
        for (int r = 0; r < num; r++)
            if (s.lane == 0) s.part[slice * rows + row + r * (WARPS >> log)] = sum[r][0];
    };
    // Short rows are multiplied side by side, as many as a warp has, up to three: registers suffice for them.
    constexpr int apart = WARPS >> log, most_rows = 2 * (outputs_of(kind) / 2 / BLOCKS + 1) * (kind == Up ? 2 : 1);
    constexpr int at_once = bytes || pieces > 4 ? 1 : least(3, (most_rows + apart - 1) / apart);
    #pragma unroll 1
    for (int row = s.warp >> log; row < rows;) {
        if (at_once == 3 && row + 2 * apart < rows) multiply_rows(row, Part<3>()), row += 3 * apart;
        else if (at_once >= 2 && row + apart < rows) multiply_rows(row, Part<2>()), row += 2 * apart;
        else multiply_rows(row, Part<1>()), row += apart;
    }
}

#if CHUNKED
// The same with chunks of codes: x by chunk as integers times a scale, in two digits of 8 bits, each a column of B.
template <int kind> INLINE void multiply_chunks(Step& s, const uint2* in, const u16* plain, const u32 tag, const void* norm,
                                                const int rows, u64* const stamps) {
    constexpr int run = RUN, width = inputs_of(kind), chunks = chunks_of(kind), log = log_slices(kind), slices = 1 << log;
    constexpr bool normed = has_norm(kind);
    constexpr int taken = taken_of(chunks * 32);
    static_assert(run * CHUNK <= SLOT, "slots are too small");
    char* const x_s = (char*)s.x_s;
    float2* const sums = (float2*)(x_s + X_SUMS);  // of a group: its sum, and what a high digit is worth
    u32 by[taken][2 * (1 + NORM32)];  // weights of the norm for inputs that are taken, which no block writes
    auto load_norm = [&](const int e) {
        #pragma unroll
        for (int u = 0; u < taken; u++) {
            const int q = e + u * THREADS;
            uint4 v = make_uint4(0, 0, 0, 0);
#if NORM32
            if (normed && q * 4 < width) v = *(const uint4*)((const float*)norm + q * 4);
            by[u][2] = v.z, by[u][3] = v.w;
#else
            if (normed && q * 4 < width) *(uint2*)&v = *(const uint2*)((const u16*)norm + q * 4);
#endif
            by[u][0] = v.x, by[u][1] = v.y;
        }
    };
    // A warp has the 128 inputs of a chunk. A word of digits is made of pairs of two lanes: 8 or 16 inputs apart.
    constexpr bool whole = chunks * 32 % (THREADS * taken) == 0;
    const int other = BY_STEP ? 2 : 4, second = s.lane / other % 2;
    const int word_of_lane = BY_STEP ? s.lane / 4 : s.lane / 8 * 2 + s.lane / 2 % 2;
    char* const digits_of_lane = x_s + word_of_lane / 4 * X_GROUP + word_of_lane % 4 * 4 + (s.lane % 2 * 2 + second) * 16;
    take_inputs<width / 4, chunks * 32, normed>(s, in, plain, tag, load_norm, [&](const int e, uint2* x) {
        u32 most[taken];
        #pragma unroll
        for (int u = 0; u < taken; u++) {
#if NORM32
            if (normed) x[u].x = narrow2(widen_low(x[u].x) * __uint_as_float(by[u][0]), widen_high(x[u].x) * __uint_as_float(by[u][1]));
            if (normed) x[u].y = narrow2(widen_low(x[u].y) * __uint_as_float(by[u][2]), widen_high(x[u].y) * __uint_as_float(by[u][3]));
#else
            if (normed) x[u].x = narrow2(widen_low(x[u].x) * widen_low(by[u][0]), widen_high(x[u].x) * widen_high(by[u][0]));
            if (normed) x[u].y = narrow2(widen_low(x[u].y) * widen_low(by[u][1]), widen_high(x[u].y) * widen_high(by[u][1]));
#endif
            const u32 tops = max_abs2(max_abs2(0, x[u].x), x[u].y);
            most[u] = max(tops & 0xffff, tops >> 16);  // magnitudes have the order of their bits
        }
        #pragma unroll
        for (int u = 0; u < taken; u++) most[u] = highest_of_warp(most[u]);
        u32 theirs[taken];
        #pragma unroll
        for (int u = 0; u < taken; u++) theirs[u] = __shfl_xor_sync(~0u, second ? x[u].x : x[u].y, other);
        int sum[taken];
        #pragma unroll
        for (int u = 0; u < taken; u++) {
            const Digits digits(most[u]);
            u32 high, low;
            digits.split(second ? theirs[u] : x[u].x, second ? x[u].y : theirs[u], high, low);
            char* const to = digits_of_lane + (e + u * THREADS) / 32 * (2 * X_GROUP);
            if (whole || e + u * THREADS < chunks * 32) *(u32*)to = high, *(u32*)(to + 64) = low;
            sum[u] = __dp4a((int)high, 0x01010101, 0) * 65536 + __dp4a((int)low, 0x01010101, 0);  // two numbers of 16 bits
        }
        if (GROUP == 128) {
            #pragma unroll
            for (int u = 0; u < taken; u++) sum[u] = sum_of_warp(sum[u]);
        } else {
            #pragma unroll
            for (int i = 1; i < GROUP / 4; i *= 2)
                #pragma unroll
                for (int u = 0; u < taken; u++) sum[u] += __shfl_xor_sync(~0u, sum[u], i);
        }
        if (s.lane % (GROUP / 4) == 0) {
            #pragma unroll
            for (int u = 0; u < taken; u++) {
                const float unit = Digits(most[u]).unit;
                if (whole || e + u * THREADS < chunks * 32)
                    sums[(e + u * THREADS) / (GROUP / 4)] = {unit * ((float)((sum[u] + 0x8000) >> 16) + (float)(short)sum[u] * (1.f / LOW_UNITS)), unit};
            }
        }
    });
    meet();
    STAMP(1);
    // A product has eight columns, two for each chunk of a piece: its high digits and its low ones. So a lane holds inputs of one
    // chunk only, all chunks' codes are multiplied with all of them, and lane t then keeps the sums of chunk t, which it scales.
    const int slice = s.warp & (slices - 1), g = s.lane >> 2, t = s.lane & 3, own = t % run;
    const char* const x_column = x_s + g / 2 % run * (2 * X_GROUP) + g % 2 * 64 + t * 16;
    constexpr bool once = chunks == run * slices;  // a warp has the same inputs for all rows
    const int each = (chunks / run - slice + slices - 1) >> log;  // pieces of a tile
    int tile = s.warp >> log, c0 = slice * run;
    int left = tile < rows / 16 ? ((rows / 16 - tile - 1) / (WARPS >> log) + 1) * each : 0;
    float acc[2] = {0.f, 0.f};
    struct Inputs { u32 x[8]; float2 digit[NG]; };
    struct Weights { u32 w[run][NW], grid[NG][2]; };
    auto load_inputs = [&](Inputs& of) {
        #pragma unroll
        for (int n = 0; n < 2; n++) {
            const uint4 v = *(const uint4*)(x_column + (c0 * 2 + n) * X_GROUP);
            of.x[n * 4] = v.x, of.x[n * 4 + 1] = v.y, of.x[n * 4 + 2] = v.z, of.x[n * 4 + 3] = v.w;
        }
        #pragma unroll
        for (int q = 0; q < NG; q++) of.digit[q] = sums[(c0 + own) * NG + q];
    };
    auto load_weights = [&](Weights& of) {
        const char* const piece = s.ring + s.slots.await();
        #pragma unroll
        for (int n = 0; n < run; n++) load_words(of.w[n], piece + n * CHUNK, s.lane);
        #pragma unroll
        for (int q = 0; q < NG * 2; q++) of.grid[q / 2][q % 2] = *(const u32*)(piece + own * CHUNK + CODES + q / 2 * 64 + g * 4 + q % 2 * 32);
        s.slots.free(s.lane);
    };
    Inputs inputs;
    load_inputs(inputs);
    auto multiply_piece = [&](const Weights& of) {
        #pragma unroll
        for (int q = 0; q < NG; q++) {
            int sum[run][4];
            #pragma unroll
            for (int n = 0; n < run; n++) {
                sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0x4b400000;
                #pragma unroll
                for (int i = q * (4 / NG); i < (q + 1) * (4 / NG); i++) {  // 32 inputs
                    u32 a[4];
                    code_bytes(a, of.w[n], i);
                    mma_bytes(sum[n], a, inputs.x[2 * i], inputs.x[2 * i + 1]);
                }
            }
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                int high = sum[0][2 * h], low = sum[0][2 * h + 1];
                #pragma unroll
                for (int n = 1; n < run; n++) high = own == n ? sum[n][2 * h] : high, low = own == n ? sum[n][2 * h + 1] : low;
                const float both = (__int_as_float(low) - SHIFTED) * (1.f / LOW_UNITS) + (__int_as_float(high) - SHIFTED);
                const float zero = high_half_float(of.grid[q][h]) * (h ? BYTE_RS : 1);
                acc[h] += scale_float(of.grid[q][h]) * (both * inputs.digit[q].y - zero * inputs.digit[q].x);
            }
        }
        if (!once) {
            const bool ends = (c0 += slices * run) >= chunks;
            if (ends) c0 = slice * run;
            load_inputs(inputs);
            if (!ends) return;
        }
        // Over the chunks of a piece: lanes of even t get row g, those of odd t row g + 8.
        float total = t % 2 ? acc[1] * (1.f / BYTE_RS) : acc[0];
        if (run > 1) total += __shfl_xor_sync(~0u, t % 2 ? acc[0] : acc[1] * (1.f / BYTE_RS), 1);
        if (run > 2) total += __shfl_xor_sync(~0u, total, 2);
        if (t < 2) s.part[slice * rows + tile * 16 + g + 8 * t] = total;
        acc[0] = acc[1] = 0.f, tile += WARPS >> log;
    };
    if (left == 0) return;
    Weights even;
#if PIECES_AHEAD
    Weights odd = {};  // written before all else, or its registers would be in use from layer to layer
    load_weights(even);
    #pragma unroll 1
    for (;;) {  // the next piece is on its way to registers while one is multiplied
        if (left > 1) load_weights(odd);
        multiply_piece(even);
        if (--left == 0) break;
        if (left > 1) load_weights(even);
        multiply_piece(odd);
        if (--left == 0) break;
    }
#else
    #pragma unroll 1
    for (; left > 0; left--) {
        load_weights(even);
        multiply_piece(even);
    }
#endif
}
#endif

struct Biases {  // of a thread's two outputs, of gate and up
    float added[2][2];
    const u16* from;
    INLINE void load(const Share mine, const int e, const bool gated) {
        if (!from || e >= mine.count) return;
        for (int n = 0; n < (gated ? 2 : 1); n++) {
            const u32 pair = *(const u32*)(from + n * D_FF + mine.first + e);
            added[n][0] = widen_low(pair), added[n][1] = widen_high(pair);
        }
    }
};
// Sums of a share's rows. `in`: words with the tag `in_tag`, or `plain` numbers.
template <int kind> INLINE void multiply(Step& s, const uint2* in, const u16* plain, const u32 in_tag, const void* norm, const int rows) {
    u64* const stamps = s.stamps;
#if CHUNKED
    if constexpr (chunked(kind)) multiply_chunks<kind>(s, in, plain, in_tag, norm, rows, stamps);
#endif
    if constexpr (!chunked(kind)) multiply_dense<kind>(s, in, plain, in_tag, norm, rows, stamps);
}
// Outputs from the sums. `residual`: of this thread's two outputs; they become the sums.
template <int kind> INLINE void write_outputs(Step& s, const Share mine, Biases& biases, uint2* out, const u32 tag, float* logits, float* residual) {
    constexpr int slices = 1 << log_slices(kind);
    constexpr bool adds = kind == Output || kind == Down;
    const int t = threadIdx.x;
    u64* const stamps = s.stamps;
    meet();
    STAMP(2);
    float scale = 1.f;
    if (has_norm(kind)) {  // of the model's width
        float all = 0.f;
        #pragma unroll
        for (int w = 0; w < WARPS; w++) all += s.squares[w];
        scale = root(all * (1.f / D_MODEL) + s.eps);
    }
    const int rows = mine.count * (kind == Up ? 2 : 1);
    auto totals_of = [&](float* to, const int row, const float* added) {  // of two rows
        float2 all = {0.f, 0.f};
        #pragma unroll
        for (int n = 0; n < slices; n++) {
            const float2 some = *(const float2*)(s.part + n * rows + row);
            all.x += some.x, all.y += some.y;
        }
        to[0] = all.x * scale + added[0], to[1] = all.y * scale + added[1];
    };
    #pragma unroll 1
    for (int e = t * 2; e < mine.count; e += THREADS * 2) {
        float v[2], up[2] = {0.f, 0.f};  // all sums before the first is used: they are read side by side
        totals_of(v, e, biases.added[0]);
        if (kind == Up) totals_of(up, mine.count + e, biases.added[1]);
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            if (kind == Up) v[i] *= inverse(1.f + __expf(-v[i])) * up[i];
            if (adds) v[i] += residual[i];
        }
        if (coded(kind)) {
            float inputs = 0.f;
            for (int n = 0; n < slices; n++) inputs += s.inputs[n];
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = mine.first + e + i;
                const u32 grid = s.head_scale[row];
                v[i] = (v[i] - (s.head_zero[row] - 128.f) * inputs * scale) * (HEAD_SCALE16 ? __uint_as_float(grid << 16) : half_float(grid));
            }
        }
        if (kind == Head) logits[mine.first + e] = v[0], logits[mine.first + e + 1] = v[1];
        else {
            const u32 pair = narrow2(v[0], v[1]);
            if (adds) residual[0] = widen_low(pair), residual[1] = widen_high(pair);
            store_now2(out + (mine.first + e) / 2, pair, tag);
        }
        biases.load(mine, e + THREADS * 2, kind == Up);
    }
    STAMP(3);
}

// ---- attention --------------------------------------------------------------------------------------------------------
INLINE float norm_weight(const void* weights, const int i) {
#if HEAD_NORM32
    return ((const float*)weights)[i];
#else
    return widen(((const u16*)weights)[i]);
#endif
}
// The keys of earlier steps that a block attends to, with `H` of the query heads that share a key head.
struct Keys {
    int shares, head, group, share, first, count, used;
    template <int H> INLINE void choose(const int position, const int window) {
        const int begin = window ? max(position - window + 1, 0) : 0, all = position - begin;
        constexpr int most_shares = BLOCKS / (HEADS / H) < SPLITS ? BLOCKS / (HEADS / H) : SPLITS;
        shares = max(1, min(most_shares, (all + SHARE_KEYS - 1) / SHARE_KEYS));
        head = blockIdx.x / shares * H, group = head / SHARED, share = blockIdx.x % shares, used = head < HEADS;
        const int size = (all + shares - 1) / shares;
        first = begin + share * size, count = used ? max(0, min(size, all - share * size)) : 0;
    }
    INLINE u64 place_of(const int* table, const u32 at) const { return (((u64)(u32)table[at / PAGE] * PAGE + at % PAGE) * GROUPS + group) * DIM; }
};
INLINE bool by_head(const Layer& layer, const int position) {  // then a block takes one query head
    return HEADS <= BLOCKS && (layer.window && (int)layer.window <= position ? (int)layer.window - 1 : position) <= SHORT_KEYS;
}
template <int H> INLINE void ask_for_keys(const Layer& layer, const int* table, const int position, const int most_keys, const int lane) {
    constexpr int lines = (DIM * 2 + 127) / 128;
    Keys mine;
    mine.choose<H>(position, (int)layer.window);
    #pragma unroll 4
    for (int e = lane; e < min(mine.count, most_keys) * lines; e += 32) {
        const u64 from = mine.place_of(table, mine.first + e / lines) + e % lines * 64;
        prefetch(layer.keys + from), prefetch(layer.values + from);
    }
}
// They come from memory behind the weights that were asked for before; so a warp of its own asks for them when the layer before
// comes to its last product, of which `reached` tells.
INLINE void ask_for_all_keys(const Layer* layers, const int num_layers, const volatile int* reached, const int* table,
                             const int position, const int lane) {
    #pragma unroll 1
    for (int l = 0; l < num_layers; l++) {
        while (*reached < l) others_run(), nap(100);
        if (by_head(layers[l], position)) ask_for_keys<1>(layers[l], table, position, SHORT_KEYS, lane);
        else ask_for_keys<SHARED>(layers[l], table, position, EARLY_KEYS, lane);
    }
}
// The key that a thread takes as its `n`th.
template <int AHEAD> INLINE int key_at(const int round, const int n, const int warp, const int lane) { return ((round * AHEAD + n) * WARPS + warp) * KEYS_OF + lane / LANES; }
// Pieces of 16 bytes in front of a thread's first keys; they are the same in all layers. Behind the last key: those of the last, so
// that no load needs a condition.
INLINE void find_places(u32* places, const Keys& mine, const int* table, const int warp, const int lane) {
    #pragma unroll
    for (int n = 0; n < KEYS_AHEAD; n++)
        if (mine.count > 0) places[n] = mine.place_of(table, mine.first + min(key_at<KEYS_AHEAD>(0, n, warp, lane), mine.count - 1)) / 8 + lane % LANES;
}
// AHEAD: pieces of keys and values that a thread asks for before q is there.
template <int H, int AHEAD> INLINE void attend(Step& s, const Layer& layer, uint2* words, const u32 tag, const int* table,
                                               const int position, const bool live, const float scale, const float head_eps) {
    u64* const stamps = s.stamps;
    STAMP(0);
    Keys own_keys = *s.keys;
    if (layer.window) own_keys.choose<H>(position, (int)layer.window);
    const int shares = own_keys.shares, group = own_keys.group, share = own_keys.share, t = threadIdx.x;
    const int first = own_keys.first, mine = own_keys.count;
    if (!own_keys.used) return;
    const bool stores = live && own_keys.head % SHARED == 0;  // the row's key and value
    float* const q_s = (float*)s.x_s;             // [H][DIM], times the scale
    float* const own_s = q_s + H * DIM;           // the row's key, then its value
    float* const sums = own_s + 2 * DIM;          // [WARPS][H][DIM]
    float* const tops = sums + WARPS * H * DIM;   // [WARPS][H][2]

    // ---- the first keys and values, and what q and k are turned by ---------------------------------------------------
    const int of_warp = s.lane / LANES, piece = s.lane % LANES;
    uint4 keys[AHEAD], values[AHEAD];
    int pages[AHEAD] = {};  // of the keys that are fetched next: their loads must not wait for loads of their places
    const int rounds = (mine + AHEAD * WARPS * KEYS_OF - 1) / (AHEAD * WARPS * KEYS_OF);
    const u16 *const keys_at = layer.keys + group * DIM + piece * 8, *const values_at = layer.values + group * DIM + piece * 8;
    auto key_at = [&](const int round, const int n) { return ::key_at<AHEAD>(round, n, s.warp, s.lane); };
    auto look_up = [&](const int round) {
        #pragma unroll
        for (int n = 0; n < AHEAD; n++) pages[n] = key_at(round, n) < mine ? table[(u32)(first + key_at(round, n)) / PAGE] : 0;
    };
    auto fetch = [&](const int round) {  // few instructions: q may be there already
        #pragma unroll
        for (int n = 0; n < AHEAD; n++) {
            keys[n] = values[n] = make_uint4(0, 0, 0, 0);
            const u64 from = (u64)(u32)pages[n] * (PAGE * GROUPS * DIM) + (u32)(first + key_at(round, n)) % PAGE * (GROUPS * DIM);
            if (key_at(round, n) < mine) keys[n] = load_late(keys_at + from), values[n] = load_late(values_at + from);
        }
        if (round + 1 < rounds) look_up(round + 1);
    };
    if (AHEAD < KEYS_AHEAD || layer.window) look_up(0), fetch(0);  // places are those of KEYS_AHEAD
    else {
        #pragma unroll
        for (int n = 0; n < AHEAD; n++) keys[n] = values[n] = make_uint4(0, 0, 0, 0);
        if (mine > 0) {
            u32 places[AHEAD];
            #pragma unroll
            for (int n = 0; n < AHEAD; n += 4) *(uint4*)(places + n) = *(const uint4*)(s.places + t * AHEAD + n);
            #pragma unroll
            for (int n = 0; n < AHEAD; n++) keys[n] = load_late(layer.keys + (u64)places[n] * 8), values[n] = load_late(layer.values + (u64)places[n] * 8);
        }
        if (rounds > 1) look_up(1);
    }
    constexpr int halves = (DIM / 4 + 31) / 32;  // words of half a head, of a lane
    const float* const turns = layer.turns + (u64)position * DIM;
    float cosine[halves][2], sine[halves][2];
    #pragma unroll
    for (int n = 0; n < halves; n++)
        for (int i = 0; i < 2; i++) {
            const int dim = (s.lane + 32 * n) * 2 + i;
            cosine[n][i] = 1.f, sine[n][i] = 0.f;
            if (layer.turns && dim < DIM / 2) cosine[n][i] = turns[dim], sine[n][i] = turns[DIM / 2 + dim];
        }

    // ---- q, and for the first share k and v --------------------------------------------------------------------------
    const uint2* const qkv = words + QKV_AT;
    #pragma unroll 1
    for (int item = s.warp; item < (share ? H : H + 2); item += WARPS) {
        const bool is_q = item < H, is_v = item == H + 1;
        const uint2* const from = qkv + (is_q ? own_keys.head + item : HEADS + (is_v ? GROUPS : 0) + group) * (DIM / 2);
        float a[halves][2], b[halves][2];
        #pragma unroll
        for (int n = 0; n < halves; n++) {
            const int at = s.lane + 32 * n;
            a[n][0] = a[n][1] = b[n][0] = b[n][1] = 0.f;
            if (at >= DIM / 4) continue;
            uint2 words[2] = {load_now2(from + at), load_now2(from + DIM / 4 + at)};
            for (int tries = 0; words[0].y != tag || words[1].y != tag; tries++) {
                look_again(tries);
                words[0] = load_now2(from + at), words[1] = load_now2(from + DIM / 4 + at);
            }
            const u32 left = words[0].x, right = words[1].x;
            a[n][0] = widen_low(left), a[n][1] = widen_high(left), b[n][0] = widen_low(right), b[n][1] = widen_high(right);
        }
#if HEAD_NORM
        float square = 0.f;
        #pragma unroll
        for (int n = 0; n < halves; n++)
            for (int i = 0; i < 2; i++) square += a[n][i] * a[n][i] + b[n][i] * b[n][i];
        const float by = root(add_lanes(square, 32) / DIM + head_eps);
#endif
        const u64 own = stores ? own_keys.place_of(table, position) : 0;
        #pragma unroll
        for (int n = 0; n < halves; n++) {
            const int dim = (s.lane + 32 * n) * 2;
            if (dim >= DIM / 2) continue;
            u16 left[2], right[2];
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                float x = a[n][i], y = b[n][i];
#if HEAD_NORM
                const void* const w = is_q ? layer.q_norm : layer.k_norm;
                if (!is_v) x *= by * norm_weight(w, dim + i), y *= by * norm_weight(w, DIM / 2 + dim + i);
#endif
                const float c = is_v ? 1.f : cosine[n][i], z = is_v ? 0.f : sine[n][i];
                left[i] = narrow(x * c - y * z), right[i] = narrow(y * c + x * z);
                float* const to = is_q ? q_s + item * DIM : own_s + (is_v ? DIM : 0);
                to[dim + i] = widen(left[i]) * (is_q ? scale : 1.f);
                to[DIM / 2 + dim + i] = widen(right[i]) * (is_q ? scale : 1.f);
            }
            if (!is_q && stores) {
                u16* const to = (is_v ? layer.values : layer.keys) + own + dim;
                *(u32*)to = left[0] | (u32)left[1] << 16, *(u32*)(to + DIM / 2) = right[0] | (u32)right[1] << 16;
            }
        }
    }
    meet();
    STAMP(1);

    // ---- softmax(q keys^T) values: LANES lanes keep a softmax of their own -------------------------------------------
    float peak[H], total[H], acc[H][8];
    const bool has_own = share == 0 && s.warp == 0 && of_warp == 0;
    const float4 *const own_key = (const float4*)(own_s + piece * 8), *const own_value = (const float4*)(own_s + DIM + piece * 8);
    #pragma unroll
    for (int h = 0; h < H; h++) {
        float score = 0.f;
        #pragma unroll
        for (int i = 0; i < 2; i++) {  // of other shares this is anything, and not used
            const float4 q = ((const float4*)(q_s + h * DIM + piece * 8))[i], k = own_key[i], v = own_value[i];
            score += q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w;
            acc[h][4 * i] = has_own ? v.x : 0.f, acc[h][4 * i + 1] = has_own ? v.y : 0.f;
            acc[h][4 * i + 2] = has_own ? v.z : 0.f, acc[h][4 * i + 3] = has_own ? v.w : 0.f;
        }
        score = add_lanes(score, LANES);
        peak[h] = has_own ? score : LEAST, total[h] = has_own ? 1.f : 0.f;
    }
    #pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        uint4 keys_now[AHEAD], values_now[AHEAD];
        #pragma unroll
        for (int n = 0; n < AHEAD; n++) keys_now[n] = keys[n], values_now[n] = values[n];
        if (H > 1 && round + 1 < rounds) fetch(round + 1);
        float score[AHEAD][H];  // all of them before the first is used: they are made side by side
        #pragma unroll
        for (int h = 0; h < H; h++) {
            const float4 q0 = *(const float4*)(q_s + h * DIM + piece * 8), q1 = *(const float4*)(q_s + h * DIM + piece * 8 + 4);
            #pragma unroll
            for (int n = 0; n < AHEAD; n++) {
                float k[8];
                eight(k, keys_now[n]);
                score[n][h] = q0.x * k[0] + q0.y * k[1] + q0.z * k[2] + q0.w * k[3];
                score[n][h] += q1.x * k[4] + q1.y * k[5] + q1.z * k[6] + q1.w * k[7];
            }
        }
        #pragma unroll
        for (int bit = 1; bit < LANES; bit *= 2)
            #pragma unroll
            for (int n = 0; n < AHEAD * H; n++) score[n / H][n % H] += __shfl_xor_sync(~0u, score[n / H][n % H], bit);
        #pragma unroll
        for (int h = 0; h < H; h++) {
            float top = peak[h];
            #pragma unroll
            for (int n = 0; n < AHEAD; n++) {
                if (key_at(round, n) >= mine) score[n][h] = LEAST;
                top = max(top, score[n][h]);
            }
            const float shrink = power2(peak[h] - top);
            peak[h] = top, total[h] *= shrink;
            #pragma unroll
            for (int i = 0; i < 8; i++) acc[h][i] *= shrink;
            #pragma unroll
            for (int n = 0; n < AHEAD; n++) {
                const float weight = score[n][h] > LEAST ? power2(score[n][h] - top) : 0.f;
                float v[8];
                eight(v, values_now[n]);
                total[h] += weight;
                #pragma unroll
                for (int i = 0; i < 8; i++) acc[h][i] += weight * v[i];
            }
        }
        if (H == 1 && round + 1 < rounds) fetch(round + 1);  // what was read first is mostly all
    }
    #pragma unroll
    for (int h = 0; h < H; h++) {
        #pragma unroll
        for (int other = LANES; other < 32; other *= 2) {
            const float there = __shfl_xor_sync(~0u, peak[h], other), top = max(peak[h], there);
            const float shrink = power2(peak[h] - top);
            peak[h] = top, total[h] *= shrink;
            total[h] += __shfl_xor_sync(~0u, total[h], other);
            #pragma unroll
            for (int i = 0; i < 8; i++) acc[h][i] *= shrink, acc[h][i] += __shfl_xor_sync(~0u, acc[h][i], other);
        }
        if (of_warp == 0) {
            float* const to = sums + (s.warp * H + h) * DIM + piece * 8;
            #pragma unroll
            for (int i = 0; i < 8; i++) to[i] = acc[h][i];
            if (piece == 0) tops[(s.warp * H + h) * 2] = peak[h], tops[(s.warp * H + h) * 2 + 1] = total[h];
        }
    }
    meet();
    STAMP(2);

    // ---- the warps' sums, then the shares' ---------------------------------------------------------------------------
    uint2* const out = words + ATTENDED_AT + own_keys.head * (DIM / 2);
    uint2* const parts = words + PARTS_AT + own_keys.head * (SPLITS * DIM);
    uint2* const parts_tops = words + TOPS_AT + own_keys.head * (SPLITS * 2);
    #pragma unroll 1
    for (int e = t * 2; e < H * DIM; e += THREADS * 2) {
        const int h = e / DIM;
        float top = LEAST, all = 0.f, sum[2] = {0.f, 0.f};
        #pragma unroll
        for (int w = 0; w < WARPS; w++) top = max(top, tops[(w * H + h) * 2]);
        #pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float by = power2(tops[(w * H + h) * 2] - top);
            all += by * tops[(w * H + h) * 2 + 1];
            for (int i = 0; i < 2; i++) sum[i] += by * sums[w * H * DIM + e + i];
        }
        if (shares == 1) store_now2(out + e / 2, narrow2(sum[0] / all, sum[1] / all), tag);
        else {
            store_now4(parts + share * (H * DIM) + e, __float_as_uint(sum[0]), tag, __float_as_uint(sum[1]), tag);
            if (e % DIM == 0) store_now4(parts_tops + (share * H + h) * 2, __float_as_uint(top), tag, __float_as_uint(all), tag);
        }
    }
    if (shares > 1) {  // this block joins some pairs of dims: its threads ask for all shares of them at once
        constexpr int pairs = H * DIM / 2;
        static_assert(4 * SPLITS <= (H + 2) * DIM, "what is joined lies where q and the warps' sums were");
        const int each = (pairs + shares - 1) / shares, begin = share * each, count = min(each, pairs - begin);
        float4* const joined = (float4*)s.x_s;  // [shares][count] peaks, totals and two sums
        meet();
        #pragma unroll 1
        for (int e = t; e < shares * count; e += THREADS) {
            const int n = e / count, pair = begin + e % count;
            const uint2 *const top_at = parts_tops + (n * H + pair * 2 / DIM) * 2, *const part_at = parts + n * (H * DIM) + pair * 2;
            uint4 top = load_now4(top_at), part = load_now4(part_at);
            for (int tries = 0; is_late(top, tag) || is_late(part, tag); tries++) {
                look_again(tries);
                top = load_now4(top_at), part = load_now4(part_at);
            }
            joined[e] = {__uint_as_float(top.x), __uint_as_float(top.z), __uint_as_float(part.x), __uint_as_float(part.z)};
        }
        meet();
        #pragma unroll 1
        for (int e = t; e < count; e += THREADS) {
            float top = LEAST, all = 0.f, sum[2] = {0.f, 0.f};
            #pragma unroll 4
            for (int n = 0; n < shares; n++) top = max(top, joined[n * count + e].x);
            #pragma unroll 4
            for (int n = 0; n < shares; n++) {
                const float4 part = joined[n * count + e];
                const float by = power2(part.x - top);
                all += by * part.y, sum[0] += by * part.z, sum[1] += by * part.w;
            }
            store_now2(out + begin + e, narrow2(sum[0] / all, sum[1] / all), tag);
        }
    }
    meet();  // x_s is written next
    STAMP(3);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32 + 32 * FILLERS, 1) row_step(
    const Layer* __restrict__ layers, const void* __restrict__ head, const u16* __restrict__ head_scale,
    const unsigned char* __restrict__ head_zero, const void* __restrict__ last_norm, const u16* x,
    void* result, uint2* words, u32* state, const int* tables, const int* tiles, u64* stamps, float eps,
    float head_eps, float last_eps, float scale, int num_layers, int table_stride) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    Step s;
    u64* const bars = (u64*)(smem + RINGS);
    Layer* const layers_s = (Layer*)(bars + WARPS * SLOTS * 2);
    s.warp = warp, s.lane = lane, s.eps = eps, s.head_scale = head_scale, s.head_zero = head_zero;
    volatile int* const reached = (int*)(layers_s + num_layers);  // layers whose last product has begun
    Keys* const keys = (Keys*)(reached + 1);
    s.keys = keys;
    s.places = (u32*)reached + 8;
    s.x_s = s.places + THREADS * KEYS_AHEAD;
    static_assert(sizeof(Keys) <= 28, "");
    static_assert(WARPS % FILLERS == 0, "a ring would have nobody who fills it");
    s.squares = (float*)((char*)s.x_s + X_BYTES);
    s.inputs = s.squares + WARPS;
    s.part = s.inputs + WARPS;
    s.ring = smem + warp * SLOTS * SLOT;
    for (int e = threadIdx.x; e < num_layers * (int)(sizeof(Layer) / 8); e += blockDim.x) ((u64*)layers_s)[e] = ((const u64*)layers)[e];
    s.slots.full = shared_address(bars + warp * SLOTS * 2), s.slots.slot = s.slots.phase = 0;
    if (warp < WARPS && lane == 0) {
        for (int n = 0; n < SLOTS * 2; n++) bar_init(s.slots.full + n * 8, 1);
        bar_init_done();
    }
#if !CHUNKED
    constexpr int shortest = least(least(part_of(Up), part_of(Output)), part_of(Down)) * 2;
    if (warp < WARPS)
        for (int n = shortest / 16 + lane; n < SLOTS * (SLOT / 16); n += 32)  // behind pieces; see multiply_dense
            if (n % (SLOT / 16) >= shortest / 16) ((uint4*)s.ring)[n] = make_uint4(0, 0, 0, 0);
    stores_before_copies();
#endif
    if (threadIdx.x == 0) *reached = 0;
    __syncthreads();
    if (warp == WARPS || warp == WARPS + 2) {
        fill_rings(layers_s, head, num_layers, warp == WARPS ? 0 : WARPS / FILLERS, lane, shared_address(smem), shared_address(bars));
        return;
    }

    grid_wait();
    const u32 step = load_late32(state);
    const int table_row = load_late32(tiles), position = load_late32(tiles + 2), live = load_late32(tiles + 3);
    const int* const table = tables + (u64)table_row * table_stride;
    const int at = live ? position : 0;
    if (warp > WARPS) {
        ask_for_all_keys(layers_s, num_layers, reached, table, at, lane);
        return;
    }
    if (threadIdx.x == 0) {
        if (HEADS <= BLOCKS && at <= SHORT_KEYS) keys->choose<1>(at, 0);
        else keys->choose<SHARED>(at, 0);
    }
    meet();
    if (HEADS <= BLOCKS && at <= SHORT_KEYS) find_places(s.places + threadIdx.x * KEYS_AHEAD, *keys, table, warp, lane);
    float residual[2] = {0.f, 0.f};
    const Share mine = share_of(Output);
    static_assert(D_MODEL / BLOCKS + 16 <= THREADS * 2, "a thread has two outputs at most that it adds to");
    if ((int)threadIdx.x * 2 < mine.count) {
        const u32 pair = load_late32(x + mine.first + threadIdx.x * 2);
        residual[0] = widen_low(pair), residual[1] = widen_high(pair);
    }
    const u32 first_tag = step * (num_layers + 1);
    // `up` beside Part<Qkv>: q, k and v, or gate and up. The two have the same inputs, so their instructions are the same; fewer
    // of them stay in the instruction cache from layer to layer.
    auto run_part = [&](const int l, const bool up, auto part) {
        constexpr int kind = decltype(part)::kind;
        const Layer& layer = layers_s[kind == Head ? 0 : l];
        const u32 tag = first_tag + l + 1;
        uint2* const here = words + (l & 1) * WORDS;
        const uint2* const before = words + (l & 1 ^ 1) * WORDS;
        auto stamp_at = [&](const int n) { s.stamps = stamps + ((u64)(l * 5 + n) * BLOCKS + blockIdx.x) * 4; };
        stamp_at(kind == Head || kind == Qkv && !up ? 0 : up ? Up + 1 : kind + 1);
        if (kind == Down && threadIdx.x == 0) *reached = l + 1;
        const bool first = kind == Qkv && !up;  // of a layer
        const Share mine = up ? share_of(Up) : share_of(kind);
        Biases biases = {{}, kind == Head ? nullptr : layer.biases[up ? Up : kind & 3]};
        {
            u64* const stamps = s.stamps;
            STAMP(0);
        }
        if (mine.count) {
            biases.load(mine, threadIdx.x * 2, up);
            const uint2* const in = kind == Output ? here + ATTENDED_AT : up ? here + MIDDLE_AT : kind == Down ? here + GATED_AT : before + LAST_AT;
            const void* const norm = up ? layer.mlp_norm : kind == Qkv ? layer.attn_norm : kind == Head ? last_norm : nullptr;
            multiply<kind == Qkv ? Up : kind>(s, in, first && l == 0 ? x : nullptr, first || kind == Head ? tag - 1 : tag, norm, mine.count << up);
            if (kind == Qkv && up) write_outputs<Up>(s, mine, biases, here + GATED_AT, tag, nullptr, residual);
            else write_outputs<kind>(s, mine, biases, here + (kind == Qkv ? QKV_AT : kind == Output ? MIDDLE_AT : LAST_AT), tag, (float*)result, residual);
        }
        if (!first) return;
        stamp_at(1);
        if (by_head(layer, at)) attend<1, KEYS_AHEAD>(s, layer, here, tag, table, at, live, scale, head_eps);
        else attend<SHARED, 2>(s, layer, here, tag, table, at, live, scale, head_eps);
    };
    #pragma unroll 1
    for (int n = 0; n < 2 * num_layers; n++) {
        const int l = n >> 1;
        run_part(l, n & 1, Part<Qkv>());
        if (n & 1) run_part(l, false, Part<Down>());
        else run_part(l, false, Part<Output>());
    }
#if HEAD
    s.eps = last_eps;
    launch_dependents();
    run_part(num_layers, false, Part<Head>());
#endif
#if !HEAD
    launch_dependents();
    if ((int)threadIdx.x * 2 < mine.count) ((u32*)result)[mine.first / 2 + threadIdx.x] = narrow2(residual[0], residual[1]);
#endif
    // The last block to end counts the step, for the tags of the next.
    if (threadIdx.x == 0 && add_to(state + 1, 1) == BLOCKS - 1) state[1] = 0, state[0] = step + 1;
}
