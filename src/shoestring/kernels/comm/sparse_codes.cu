// Sparse codes on a GPU (sparse_codes.py): a block takes one row of at most 65,536 values.
//
//   sample -> a bound that a few more than k values reach (a histogram of exponents and three bits of the mantissa)
//   one pass over the row: a bit in shared memory for each value that reaches the bound; the error is written on the way
//   the bits become an ordered list of candidates (prefix sums of their counts)
//   exact threshold among them by three histograms; the chosen ones are written in order, of equal ones the first
//
// Where the bound keeps fewer than k or more than ROOM, threshold and order come from the whole row instead.
// Macros: THREADS, BLOCKS (of a multiprocessor), ROOM (candidates), SAMPLE (values).

constexpr int BINS = 2048, WORDS = 2048, PER_THREAD = BINS / THREADS, WARPS = THREADS / 32;

struct Shared {
  u32 bins[BINS];
  u32 words[WORDS];  // a bit for each value of the row
  u32 bits[ROOM];    // candidates: magnitudes as integers, and places
  u16 at[ROOM];
  u32 sums[WARPS];
  u32 total, bin, rest;
};

INLINE u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Sum of `value` over the threads before this one; s.total is that of all.
INLINE u32 scan(u32 value, Shared &s) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 sum = value;
  for (int d = 1; d < 32; d *= 2) {
    u32 other = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += other;
  }
  __syncthreads();
  if (lane == 31) s.sums[warp] = sum;
  __syncthreads();
  u32 before = 0, all = 0;
  for (int w = 0; w < WARPS; ++w) {
    u32 part = s.sums[w];
    before += w < warp ? part : 0;
    all += part;
  }
  if (threadIdx.x == 0) s.total = all;
  __syncthreads();
  return before + sum - value;
}

INLINE void clear(u32 *table, int num) {
  for (int i = threadIdx.x; i < num; i += THREADS) table[i] = 0;
}

// The highest bin that k values reach or pass: s.bin; how many of them it must give: s.rest. Counts are in s.bins.
INLINE void find_bin(u32 k, Shared &s) {
  int last = BINS - 1 - threadIdx.x * PER_THREAD;  // thread 0 has the highest bins
  u32 sum = 0;
  for (int i = 0; i < PER_THREAD; ++i) sum += s.bins[last - i];
  u32 above = scan(sum, s);
  if (above < k && above + sum >= k)
    for (int i = 0; i < PER_THREAD; ++i) {
      u32 count = s.bins[last - i];
      if (above + count >= k) {
        s.bin = last - i;
        s.rest = k - above;
        break;
      }
      above += count;
    }
  __syncthreads();
}

// The k-th largest of bits(0) ... bits(num - 1); `rest` is how many equal to it are among the k largest.
template <class Bits>
INLINE u32 kth_largest(Bits bits, int num, u32 k, u32 &rest, Shared &s) {
  u32 found = 0, known = 0;
  for (int pass = 0; pass < 3; ++pass) {
    int shift = 20 - 10 * pass, width = pass ? 10 : 11;
    __syncthreads();
    clear(s.bins, BINS);
    __syncthreads();
    for (int i = threadIdx.x; i < num; i += THREADS) {
      u32 b = bits(i);
      if ((b & known) == found) atomicAdd(&s.bins[(b >> shift) & ((1u << width) - 1)], 1u);
    }
    __syncthreads();
    find_bin(k, s);
    found |= s.bin << shift;
    known |= ((1u << width) - 1) << shift;
    k = s.rest;
  }
  rest = k;
  return found;
}

INLINE u16 to_bf16(float x) {
  const float most = __uint_as_float(0x7f7f0000u);
  if (x != x) return 0x7fc0;
  u32 bits = __float_as_uint(fminf(fmaxf(x, -most), most));
  return (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Values above the threshold, and the first `rest` that equal it, of items 0 ... num - 1 in their order.
template <class Bits, class Place>
INLINE void write_chosen(Bits bits, Place place, int num, u32 threshold, u32 rest, const float *x, u16 *values,
                         short *places, float *error, Shared &s) {
  int part = (num + THREADS - 1) / THREADS, first = min(num, (int)threadIdx.x * part), last = min(num, first + part);
  u32 above = 0, equal = 0;
  for (int i = first; i < last; ++i) {
    above += bits(i) > threshold;
    equal += bits(i) == threshold;
  }
  u32 equal_before = scan(equal, s), above_before = scan(above, s);
  u32 at = above_before + min(equal_before, rest);
  for (int i = first; i < last; ++i) {
    u32 b = bits(i);
    if (b < threshold || (b == threshold && equal_before++ >= rest)) continue;
    int p = place(i);
    float value = x[p];
    u16 sent = to_bf16(value);
    values[at] = sent;
    places[at] = (short)(p - 32768);
    if (error) error[p] = value - __uint_as_float((u32)sent << 16);
    ++at;
  }
}

// Four values from i on, which is a multiple of four; past the end zeros, whose places are never kept.
template <bool WHOLE>
INLINE float4 load4(const float *x, int i, int num) {
  if (WHOLE || (i + 3 < num)) return *(const float4 *)(x + i);
  return make_float4(i < num ? x[i] : 0, i + 1 < num ? x[i + 1] : 0, i + 2 < num ? x[i + 2] : 0, 0);
}

template <bool WHOLE>
INLINE void pass_over(const float *x, float *error, int num, u32 bound, Shared &s) {
#pragma unroll 8
  for (int i = threadIdx.x * 4; i < (WHOLE ? 65536 : num); i += THREADS * 4) {
    float4 v = load4<WHOLE>(x, i, num);
    if (error) {
      if (WHOLE || i + 3 < num) {
        *(float4 *)(error + i) = v;
      } else {
        for (int j = i; j < num; ++j) error[j] = x[j];
      }
    }
    u32 hit = (magnitude(v.x) >= bound) | (magnitude(v.y) >= bound) << 1 | (magnitude(v.z) >= bound) << 2 |
              (magnitude(v.w) >= bound) << 3;
    if (!WHOLE && i + 3 >= num) hit &= (1u << (num - i)) - 1;
    if (hit) atomicOr(&s.words[i / 32], hit << (i % 32));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    encode_top(const float *x, u16 *values, short *places, float *error, int num, int k, int rank) {
  Shared &s = *(Shared *)smem;
  long long row = blockIdx.x;
  x += row * num;
  values += row * k;
  places += row * k;
  if (error) error += row * num;

  clear(s.words, WORDS);
  u32 bound = 0;
  if (num > ROOM) {
    clear(s.bins, BINS);
    __syncthreads();
    // Pieces of 512 bytes, one for each warp and turn, spread over the row.
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int turn = 0; turn < SAMPLE / (THREADS * 4); ++turn) {
      long long piece = turn * WARPS + warp;
      int i = (int)(piece * (num - 128) / (SAMPLE / 128 - 1)) / 4 * 4 + lane * 4;
      float4 v = *(const float4 *)(x + i);
      atomicAdd(&s.bins[magnitude(v.x) >> 20], 1u);
      atomicAdd(&s.bins[magnitude(v.y) >> 20], 1u);
      atomicAdd(&s.bins[magnitude(v.z) >> 20], 1u);
      atomicAdd(&s.bins[magnitude(v.w) >> 20], 1u);
    }
    __syncthreads();
    find_bin(min(rank, SAMPLE), s);
    bound = s.bin << 20;
  }
  __syncthreads();
  if (num == 65536)
    pass_over<true>(x, error, num, bound, s);
  else
    pass_over<false>(x, error, num, bound, s);
  __syncthreads();

  u32 mine = 0;
  int word = threadIdx.x * (WORDS / THREADS);
  for (int w = 0; w < WORDS / THREADS; ++w) mine += __popc(s.words[word + w]);
  u32 at = scan(mine, s);
  int count = (int)s.total;
  u32 rest;
  if (count >= k && count <= ROOM) {
    for (int w = 0; w < WORDS / THREADS; ++w)
      for (u32 left = s.words[word + w]; left; left &= left - 1) {
        int place = (word + w) * 32 + __ffs(left) - 1;
        s.at[at] = (u16)place;
        s.bits[at++] = magnitude(x[place]);
      }
    __syncthreads();
    auto bits = [&](int i) { return s.bits[i]; };
    u32 threshold = kth_largest(bits, count, k, rest, s);
    write_chosen(bits, [&](int i) { return (int)s.at[i]; }, count, threshold, rest, x, values, places, error, s);
  } else {
    auto bits = [&](int i) { return magnitude(x[i]); };
    u32 threshold = kth_largest(bits, num, k, rest, s);
    write_chosen(bits, [](int i) { return i; }, num, threshold, rest, x, values, places, error, s);
  }
}

// out [rows, num] = the sum of what the messages hold, one after the other. A message begins `stride` bytes after the
// one before; values and places begin at these bytes of it.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    sum_top(const unsigned char *wire, long long stride, int senders, long long values_at, long long places_at, float *out,
            int num, int k) {
  long long row = blockIdx.x;
  out += row * num;
  for (int i = threadIdx.x * 4; i < num; i += THREADS * 4) {
    if (i + 3 < num)
      *(float4 *)(out + i) = make_float4(0, 0, 0, 0);
    else
      for (int j = i; j < num; ++j) out[j] = 0;
  }
  for (int sender = 0; sender < senders; ++sender) {
    const u16 *values = (const u16 *)(wire + sender * stride + values_at) + row * k;
    const short *places = (const short *)(wire + sender * stride + places_at) + row * k;
    __syncthreads();
    for (int j = threadIdx.x; j < k; j += THREADS) {
      int place = places[j] + 32768;
      if (place < num) out[place] += __uint_as_float((u32)values[j] << 16);
    }
  }
}
