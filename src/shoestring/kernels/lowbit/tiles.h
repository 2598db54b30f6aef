// Integer weights in tiles times rows of inputs that are rounded to 8 bits: what the CPU's C++ kernels share.
// The text of a kernel follows this one in the same file (tiled_linear.py).
//
//   x' = level[b] * codes              a row of inputs in 8 bits, b the block of 64 or 32 inputs
//   y  = x' W^T, W[n, k] = scale[n, g] * (code[n, k] - zero[n, g]), sums over a block in integers, or
//                W[n, k] = scale[n, g] * code[n, k] + offset[n, g]
//
// Rows of a weight are stored in tiles of 8. A piece of a tile is 128 bytes, [4 quads][8 rows][4 inputs]: at 4 bits
// the low halves belong to 16 inputs and the high halves to the next 16; at 8 bits both belong to the same 16.
// Integer products are therefore accumulated with one row per lane, and no sum crosses lanes.
//
// Products are Arm's dot products, x86's AVX-512 VNNI, AVX-VNNI or AVX2; elsewhere a loop. All give the same integers.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>
#include <unistd.h>
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t ROWS = 8, LANES = 16, PIECE = 128;

struct Matrix {
  int64_t rows, width, group, bits;  // rows: a multiple of 8; 0: no matrix
  const uint8_t *codes;              // [rows / 8][width in pieces][128]
  const float *scale;                // [rows / 8][groups][8]
  const uint8_t *zero;               // [rows / 8][groups][8], or null: there are offsets
  const float *offset;               // [rows / 8][groups][8], or null
  const float *bias;                 // [rows], or null
};

// The zero points of a tile's group, which begin at `at`.
inline const uint8_t *zeros_of(const Matrix &m, int64_t at) {
  static constexpr uint8_t NONE[ROWS] = {};
  return m.zero ? m.zero + at : NONE;
}

// -- threads ------------------------------------------------------------------------------------------------

void relax(int &spins) {
  if (++spins % 1024 == 0) std::this_thread::yield();  // another process may need this core
}

// Threads that wait between tokens and synchronize at barriers within one.
class Team {
 public:
  explicit Team(int size) : size(size), process(getpid()) {
    for (int rank = 1; rank < size; ++rank) others.emplace_back([this, rank] { serve(rank); });
  }
  ~Team() {
    call = nullptr;
    begin();
    for (auto &other : others) other.join();
  }

  template <class Work>
  void run(Work &work) {
    call = [](void *w, int rank) { (*static_cast<Work *>(w))(rank); };
    argument = &work;
    begin();
    call(argument, 0);
    meet();
  }

  void meet() {
    const uint32_t now = phase.load();
    if (arrived.fetch_add(1) + 1 == size) {
      arrived.store(0);
      phase.store(now + 1);
      return;
    }
    for (int spins = 0; phase.load(std::memory_order_acquire) == now;) relax(spins);
  }

  const int size;
  const pid_t process;  // a forked child does not have its parent's threads

 private:
  void begin() {
    turn.fetch_add(1);
    turn.notify_all();
  }
  void serve(int rank) {
    for (uint32_t seen = 0;; meet()) {
      turn.wait(seen++);
      if (call == nullptr) return;
      call(argument, rank);
    }
  }

  void (*call)(void *, int) = nullptr;
  void *argument = nullptr;
  std::atomic<uint32_t> turn{0}, phase{0};
  std::atomic<int> arrived{0};
  std::vector<std::thread> others;
};

// Calls use(team) with the one team of this process; callers take turns.
template <class Use>
void with_team(int threads, Use use) {
  static std::mutex one_at_a_time;
  static Team *team = nullptr;  // never destroyed: its threads end with the process
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  if (team != nullptr && team->process != getpid()) team = nullptr;
  if (team != nullptr && team->size != threads) delete team, team = nullptr;
  if (team == nullptr) team = new Team(threads);
  use(*team);
}

// The threads of torch's operators (kernels/runtime/openmp.py): calls work(rank, size) on each of at most so many.
struct Pool {
  void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
  int (*rank)(), (*size)();
};

template <class Work>
void on_pool(const Pool &pool, int threads, Work &work) {
  struct Call {
    const Pool &pool;
    Work &work;
  } call{pool, work};
  const auto enter = [](void *c) {
    const Call &call = *static_cast<Call *>(c);
    call.work(call.pool.rank(), call.pool.size());
  };
  pool.parallel(enter, &call, static_cast<unsigned>(threads), 0);
}

// -- rows of inputs in 8 bits -------------------------------------------------------------------------------

// The compiler splits it as the processor needs. Not longer: registers of 64 bytes may slow a core down, and a token has
// too little work for them.
constexpr int WIDE = 8;
typedef float Wide __attribute__((vector_size(4 * WIDE)));

// Inputs that share a level, in weights with such groups (a multiple of 32).
inline int64_t block_of(int64_t group) { return group % 64 == 0 ? 64 : 32; }

#if defined(__AVX2__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define PAIRS  // of tiles are multiplied at a time, in registers of 64 bytes
#endif
constexpr int64_t PANEL = 16;  // rows of inputs that are multiplied with a pair at a time, at most

class Inputs {
 public:
  int64_t rows = 0, width = 0, block = 0, blocks = 0;
  std::vector<int8_t> codes;
  std::vector<float> level, sums;  // [rows][blocks]; sums: of the codes, exact
#if defined(PAIRS)
  std::vector<int8_t> panels;  // the same again for more than one row: see `arrange`
#endif

  void resize(int64_t new_rows, int64_t new_width, int64_t group) {
    rows = new_rows, width = new_width, block = block_of(group), blocks = width / block;
    int64_t room = rows;
#if defined(PAIRS)
    if (rows > 1) room = num_panels() * PANEL, panels.resize(room * (width + 8 * blocks));
#endif
    codes.resize(room * width), level.resize(room * blocks), sums.resize(room * blocks);
  }

  int64_t num_panels() const { return (rows + PANEL - 1) / PANEL; }

  // Rounds the rows of panel i of x [rows][width].
  void read(const float *x, int64_t i) {
    for (int64_t row = i * PANEL; row < std::min(rows, (i + 1) * PANEL); ++row)
      block == 64 ? round<64>(x + row * width, row) : round<32>(x + row * width, row);
#if defined(PAIRS)
    if (rows > 1) visit(i, [this](auto R, int64_t first, int8_t *panel) { arrange<R>(first, panel); });
#endif
  }

#if defined(PAIRS)
  // Calls use(integral constant R, first row, panel): panel i has R rows, of which the last ones may not exist.
  template <class Use>
  void visit(int64_t i, Use use) {
    const int64_t first = i * PANEL, rest = rows - first;
    int8_t *const own = panels.data() + first * (width + 8 * blocks);
    if (rest <= 2) return use(std::integral_constant<int, 2>(), first, own);
    if (rest <= 4) return use(std::integral_constant<int, 4>(), first, own);
    if (rest <= 8) return use(std::integral_constant<int, 8>(), first, own);
    use(std::integral_constant<int, PANEL>(), first, own);
  }
#endif

 private:
  template <int NUM>
  void round(const float *x, int64_t row) {
    const int64_t begin = row * blocks, end = begin + blocks;
    for (int64_t b = begin; b < end; ++b, x += NUM)
      sums[b] = round_block<NUM>(x, codes.data() + b * NUM, level[b]);
  }
  // The sum of the codes.
  template <int NUM>
  static float round_block(const float *__restrict x, int8_t *__restrict out, float &level) {
    Wide top = {}, all = {};
    for (int k = 0; k < NUM; k += WIDE) {
      Wide v;
      __builtin_memcpy(&v, x + k, sizeof v);
      const Wide size = v < 0 ? -v : v;
      top = size > top ? size : top, all += v;
    }
    for (int j = 1; j < WIDE; ++j) top[0] = top[j] > top[0] ? top[j] : top[0], all[0] += all[j];
    const float step = top[0] / 127;
    const float inverse = step > std::numeric_limits<float>::min() ? 1 / step : 0;
    level = step + 0 * all[0];  // nan where an input is nan or infinite
    int32_t sum = 0;
    for (int k = 0; k < NUM; ++k) {
      const float q = std::nearbyint(x[k] * inverse);
      out[k] = static_cast<int8_t>(static_cast<int32_t>(q > 127 ? 127 : q >= -127 ? q : -127));
      sum += out[k];
    }
    return static_cast<float>(sum);
  }
#if defined(PAIRS)
  // Rows first to first + R, block by block: codes [block / 4][R][4], levels [R], sums [R]. What is multiplied together
  // lies together.
  template <int R>
  void arrange(int64_t first, int8_t *panel) const {
    for (int64_t b = 0; b < blocks; ++b, panel += (block + 8) * R)
      for (int r = 0; r < R; ++r) {
        const int8_t *const x = codes.data() + (first + r) * width + b * block;
        for (int64_t k = 0; k < block; k += 4) __builtin_memcpy(panel + k * R + 4 * r, x + k, 4);
        __builtin_memcpy(panel + block * R + 4 * r, &level[(first + r) * blocks + b], 4);
        __builtin_memcpy(panel + (block + 4) * R + 4 * r, &sums[(first + r) * blocks + b], 4);
      }
  }
#endif
};

// a * b + c in one rounding where the processor can: the compiler would choose anew in every place that this is inlined
// in, and a row's results would depend on how many rows are multiplied with it.
inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// -- products -----------------------------------------------------------------------------------------------

// Sums of the 8 rows of a tile over a block, for R rows of inputs that are `stride` bytes apart: `add` takes a piece and
// its inputs, `scale` adds scale * level * (sum - zero * x_sum) of one of them to `out`. All in the brackets are integers
// below 2^24 (64 * 255 * 127), which fp32 has exactly.
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int MOST = 4;  // rows of inputs at a time

template <int BITS, int R>
struct Sums {
  int32x4_t even[R][2] = {}, odd[R][2] = {};

  template <int QUAD>
  void add(const uint8_t *piece, const int8x16_t *x, const int8x16_t *x_high) {
    for (int half = 0; half < 2; ++half) {
      const uint8x16_t w = vld1q_u8(piece + 32 * QUAD + 16 * half);
      if constexpr (BITS == 4) {
        const int8x16_t w_low = vreinterpretq_s8_u8(vandq_u8(w, vdupq_n_u8(15)));
        const int8x16_t w_high = vreinterpretq_s8_u8(vshrq_n_u8(w, 4));
        for (int r = 0; r < R; ++r) {
          even[r][half] = vdotq_laneq_s32(even[r][half], w_low, x[r], QUAD);
          odd[r][half] = vdotq_laneq_s32(odd[r][half], w_high, x_high[r], QUAD);
        }
      } else {  // products are of signed bytes: 128 is taken from codes here and from zeros below
        const int8x16_t centred = vreinterpretq_s8_u8(veorq_u8(w, vdupq_n_u8(128)));
        for (int r = 0; r < R; ++r) {
          int32x4_t &sum = QUAD % 2 ? odd[r][half] : even[r][half];
          sum = vdotq_laneq_s32(sum, centred, x[r], QUAD);
        }
      }
    }
  }
  void add(const uint8_t *piece, const int8_t *x, int64_t stride) {
    int8x16_t a[R], b[R];
    for (int r = 0; r < R; ++r) a[r] = vld1q_s8(x + r * stride), b[r] = BITS == 4 ? vld1q_s8(x + r * stride + 16) : a[r];
    add<0>(piece, a, b), add<1>(piece, a, b), add<2>(piece, a, b), add<3>(piece, a, b);
  }
  void scale(int r, const float *scales, const uint8_t *zeros, float level, float x_sum, float *out) const {
    const int16x8_t codes = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(zeros)));
    const int16x8_t zero = vsubq_s16(vdupq_n_s16(BITS == 4 ? 0 : 128), codes);  // negative
    const int32x4_t wide[2] = {vmovl_s16(vget_low_s16(zero)), vmovl_s16(vget_high_s16(zero))};
    for (int half = 0; half < 2; ++half) {
      const float32x4_t products = vcvtq_f32_s32(vaddq_s32(even[r][half], odd[r][half]));
      const float32x4_t sum = vfmaq_n_f32(products, vcvtq_f32_s32(wide[half]), x_sum);
      const float32x4_t both = vmulq_n_f32(vld1q_f32(scales + 4 * half), level);
      vst1q_f32(out + 4 * half, vfmaq_f32(vld1q_f32(out + 4 * half), sum, both));
    }
  }
};
#elif defined(__AVX2__)
inline __m256i quad_of(const int8_t *x) {  // four inputs in every lane
  int32_t quad;
  __builtin_memcpy(&quad, x, 4);
  return _mm256_set1_epi32(quad);
}
inline __m256i quad_of(const uint8_t *piece, int quad) {  // of the weights
  return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(piece + 32 * quad));
}
inline __m256i low_halves(__m256i w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
inline __m256i high_halves(__m256i w) { return low_halves(_mm256_srli_epi16(w, 4)); }

#if (defined(__AVX512VNNI__) && defined(__AVX512VL__)) || defined(__AVXVNNI__)
constexpr int MOST = 8;

inline __m256i add_products(__m256i sum, __m256i w, __m256i x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpbusd_epi32(sum, w, x);
#else
  return _mm256_dpbusd_avx_epi32(sum, w, x);
#endif
}

template <int BITS, int R>
struct Total {
  static constexpr int CHAINS = R == 1 ? 4 : R <= 4 ? 2 : 1;  // products of a chain wait for each other
  __m256i chain[R][CHAINS] = {};

  void add(const uint8_t *piece, const int8_t *x, int64_t stride) {
    for (int quad = 0; quad < 4; ++quad) {
      const __m256i w = quad_of(piece, quad);
      if constexpr (BITS == 8) {
        for (int r = 0; r < R; ++r) join(chain[r][quad % CHAINS], w, x + r * stride + 4 * quad);
        continue;
      }
      const __m256i low = low_halves(w), high = high_halves(w);
      for (int r = 0; r < R; ++r) join(chain[r][2 * quad % CHAINS], low, x + r * stride + 4 * quad);
      for (int r = 0; r < R; ++r) join(chain[r][(2 * quad + 1) % CHAINS], high, x + r * stride + 16 + 4 * quad);
    }
  }
  __m256i total(int r) const {
    __m256i sum = chain[r][0];
    for (int i = 1; i < CHAINS; ++i) sum = _mm256_add_epi32(sum, chain[r][i]);
    return sum;
  }

 private:
  static void join(__m256i &sum, __m256i w, const int8_t *x) { sum = add_products(sum, w, quad_of(x)); }
};
#else
constexpr int MOST = 4;

// Sums of two products are in 16 bits: eight of them fit, of halves of bytes. At 8 bits halves are summed apart.
template <int BITS, int R>
struct Total {
  __m256i sum[R] = {};

  void add(const uint8_t *piece, const int8_t *x, int64_t stride) {
    __m256i low[4], high[4];
    for (int quad = 0; quad < 4; ++quad) {
      const __m256i w = quad_of(piece, quad);
      low[quad] = low_halves(w), high[quad] = high_halves(w);
    }
    for (int r = 0; r < R; ++r) {
      const int8_t *const of_low = x + r * stride, *const of_high = of_low + (BITS == 4 ? 16 : 0);
      __m256i a = _mm256_setzero_si256(), b = a;
      for (int quad = 0; quad < 4; ++quad) {
        a = _mm256_add_epi16(a, _mm256_maddubs_epi16(low[quad], quad_of(of_low + 4 * quad)));
        b = _mm256_add_epi16(b, _mm256_maddubs_epi16(high[quad], quad_of(of_high + 4 * quad)));
      }
      if (BITS == 4)
        sum[r] = _mm256_add_epi32(sum[r], widened(_mm256_add_epi16(a, b)));
      else
        sum[r] = _mm256_add_epi32(sum[r], _mm256_add_epi32(widened(a), _mm256_slli_epi32(widened(b), 4)));
    }
  }
  __m256i total(int r) const { return sum[r]; }

 private:
  static __m256i widened(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
};
#endif

template <int BITS, int R>
struct Sums : Total<BITS, R> {
  void scale(int r, const float *scales, const uint8_t *zeros, float level, float x_sum, float *out) const {
    const __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(zeros)));
    const __m256 zero = _mm256_cvtepi32_ps(codes), products = _mm256_cvtepi32_ps(this->total(r));
    const __m256 both = _mm256_mul_ps(_mm256_loadu_ps(scales), _mm256_set1_ps(level)), before = _mm256_loadu_ps(out);
#if defined(__FMA__)
    const __m256 sum = _mm256_fnmadd_ps(zero, _mm256_set1_ps(x_sum), products);
    _mm256_storeu_ps(out, _mm256_fmadd_ps(sum, both, before));
#else
    const __m256 sum = _mm256_sub_ps(products, _mm256_mul_ps(zero, _mm256_set1_ps(x_sum)));
    _mm256_storeu_ps(out, _mm256_add_ps(_mm256_mul_ps(sum, both), before));
#endif
  }
};
#else
constexpr int MOST = 4;

template <int BITS, int R>
struct Sums {
  int32_t sum[R][ROWS] = {};

  void add(const uint8_t *piece, const int8_t *x, int64_t stride) {
    for (int r = 0; r < R; ++r)
      for (int quad = 0; quad < 4; ++quad)
        for (int row = 0; row < ROWS; ++row)
          for (int j = 0; j < 4; ++j) {
            const int32_t w = piece[32 * quad + 4 * row + j];
            const int8_t *const of_low = x + r * stride + 4 * quad + j;
            sum[r][row] += BITS == 4 ? (w & 15) * of_low[0] + (w >> 4) * of_low[16] : w * of_low[0];
          }
  }
  void scale(int r, const float *scales, const uint8_t *zeros, float level, float x_sum, float *out) const {
    for (int row = 0; row < ROWS; ++row)
      out[row] = fused(fused(-zeros[row], x_sum, sum[r][row]), scales[row] * level, out[row]);
  }
};
#endif

// Adds offset * x_sum for the 8 rows of a tile; x_sum: of a block of x', with its level.
inline void add_offset(const float *offset, float x_sum, float *out) {
  for (int row = 0; row < ROWS; ++row) out[row] = fused(offset[row], x_sum, out[row]);
}

// The 8 rows of tile `t` times R rows of inputs from `first` on: y [R][8].
template <int BITS, int R>
void product(const Matrix &m, int64_t t, const Inputs &in, int64_t first, float *y) {
  constexpr int64_t STEP = BITS == 4 ? 32 : 16;
  const int64_t groups = m.width / m.group, each = m.group / in.block;  // each: blocks of a group
  const uint8_t *piece = m.codes + t * (m.width / STEP) * PIECE;
  const int8_t *x = in.codes.data() + first * m.width;
  int64_t of_x = first * in.blocks;
  float out[R][ROWS] = {};
  for (int64_t g = t * groups; g < (t + 1) * groups; ++g)
    for (const int64_t end = of_x + each; of_x < end; ++of_x) {
      Sums<BITS, R> sums;
      for (int64_t k = 0; k < in.block; k += STEP, x += STEP, piece += PIECE) sums.add(piece, x, m.width);
      for (int r = 0; r < R; ++r) {
        const float level = in.level[of_x + r * in.blocks], x_sum = in.sums[of_x + r * in.blocks];
        sums.scale(r, m.scale + g * ROWS, zeros_of(m, g * ROWS), level, x_sum, out[r]);
        if (m.offset) add_offset(m.offset + g * ROWS, level * x_sum, out[r]);
      }
    }
  for (int r = 0; r < R; ++r)
    for (int row = 0; row < ROWS; ++row) y[r * ROWS + row] = out[r][row] + (m.bias ? m.bias[t * ROWS + row] : 0);
}

// Calls use(row, first output, results, their number) for rows first to stop of the inputs times tile t.
template <class Use>
void multiply_tile(const Matrix &m, int64_t t, const Inputs &in, int64_t first, int64_t stop, Use use) {
  const auto several = [&](auto R) {  // they share the unpacking of codes
    for (float y[R * ROWS]; first + R <= stop; first += R) {
      m.bits == 4 ? product<4, R>(m, t, in, first, y) : product<8, R>(m, t, in, first, y);
      for (int r = 0; r < R; ++r) use(first + r, t * ROWS, y + r * ROWS, ROWS);
    }
  };
  several(std::integral_constant<int, MOST>());
  if constexpr (MOST > 4) several(std::integral_constant<int, 4>());
  several(std::integral_constant<int, 2>());
  several(std::integral_constant<int, 1>());
}

#if defined(PAIRS)
// -- two tiles at a time ------------------------------------------------------------------------------------

inline __m512i pair(const uint8_t *a, const uint8_t *b) {  // 32 bytes of each
  const auto load = [](const uint8_t *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); };
  return _mm512_inserti64x4(_mm512_castsi256_si512(load(a)), load(b), 1);
}
inline __m512 pair(const float *a, const float *b) {  // 8 floats of each
  const __m512d low = _mm512_castpd256_pd512(_mm256_castps_pd(_mm256_loadu_ps(a)));
  return _mm512_castpd_ps(_mm512_insertf64x4(low, _mm256_castps_pd(_mm256_loadu_ps(b)), 1));
}
inline __m512i widened_pair(const uint8_t *a, const uint8_t *b) {  // 8 bytes of each, as integers of 32 bits
  const auto load = [](const uint8_t *p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)); };
  return _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(load(a), load(b)));
}

template <class Value>
Value value_at(const int8_t *bytes) {
  Value value;
  __builtin_memcpy(&value, bytes, sizeof value);
  return value;
}

// As `product` of tiles t and t + 1, to the bit: y [R][16], in which sums over the blocks so far are kept: all registers
// are needed within a block.
template <int BITS, int R>
void product_of_pair(const Matrix &m, int64_t t, int64_t block, const int8_t *panel, float *y) {
  constexpr int64_t STEP = BITS == 4 ? 32 : 16;
  const int64_t groups = m.width / m.group, next = m.width / STEP * PIECE;
  const uint8_t *piece = m.codes + t * next;
  const __m512i low_half = _mm512_set1_epi8(15);
  std::fill(y, y + R * 2 * ROWS, 0.f);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = (t * groups + g) * ROWS, below = at + groups * ROWS;
    const __m512 zero = _mm512_cvtepi32_ps(widened_pair(zeros_of(m, at), zeros_of(m, below)));
    const __m512 scale = pair(m.scale + at, m.scale + below);
    const __m512 offset = m.offset ? pair(m.offset + at, m.offset + below) : scale;
    for (int64_t b = 0; b < m.group; b += block) {
      __m512i sum[R];
      for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_si512();
      const auto add = [&sum](__m512i w, const int8_t *x) {
        for (int r = 0; r < R; ++r)
          sum[r] = _mm512_dpbusd_epi32(sum[r], w, _mm512_set1_epi32(value_at<int32_t>(x + 4 * r)));
      };
      for (int64_t k = 0; k < block; k += STEP, panel += STEP * R, piece += PIECE)
        for (int quad = 0; quad < 4; ++quad) {
          const __m512i w = pair(piece + 32 * quad, piece + next + 32 * quad);
          if constexpr (BITS == 8) {
            add(w, panel + 4 * R * quad);
            continue;
          }
          add(_mm512_and_si512(w, low_half), panel + 4 * R * quad);
          add(_mm512_and_si512(_mm512_srli_epi16(w, 4), low_half), panel + 4 * R * (quad + 4));
        }
      for (int r = 0; r < R; ++r, y += 2 * ROWS) {
        const __m512 level = _mm512_set1_ps(value_at<float>(panel + 4 * r));
        const __m512 x_sum = _mm512_set1_ps(value_at<float>(panel + 4 * (R + r)));
        const __m512 exact = _mm512_fnmadd_ps(zero, x_sum, _mm512_cvtepi32_ps(sum[r]));
        __m512 result = _mm512_fmadd_ps(exact, _mm512_mul_ps(scale, level), _mm512_loadu_ps(y));
        if (m.offset) result = _mm512_fmadd_ps(offset, _mm512_mul_ps(level, x_sum), result);
        _mm512_storeu_ps(y, result);
      }
      y -= R * 2 * ROWS, panel += 8 * R;
    }
  }
  if (m.bias)
    for (int r = 0; r < R; ++r, y += 2 * ROWS)
      _mm512_storeu_ps(y, _mm512_add_ps(_mm512_loadu_ps(y), _mm512_loadu_ps(m.bias + t * ROWS)));
}

// The same as `multiply_tile`, for tiles t and t + 1 and rows from the start of a panel on.
template <class Use>
void multiply_pair(const Matrix &m, int64_t t, Inputs &in, int64_t first, int64_t stop, Use use) {
  for (int64_t i = first / PANEL; i * PANEL < stop; ++i)
    in.visit(i, [&](auto R, int64_t row, const int8_t *panel) {
      float y[R * 2 * ROWS];
      m.bits == 4 ? product_of_pair<4, R>(m, t, in.block, panel, y) : product_of_pair<8, R>(m, t, in.block, panel, y);
      for (int64_t r = row; r < std::min(stop, row + R); ++r) use(r, t * ROWS, y + 2 * ROWS * (r - row), 2 * ROWS);
    });
}
#endif

// Calls use(row, first output, results, their number) for rows first to stop of the inputs times tiles begin to end; `first`
// is a multiple of PANEL. What a row gives does not depend on the others.
template <class Use>
void multiply_tiles(const Matrix &m, int64_t begin, int64_t end, Inputs &in, int64_t first, int64_t stop, Use use) {
#if defined(PAIRS)
  if (in.rows > 1)
    for (; begin + 2 <= end; begin += 2) multiply_pair(m, begin, in, first, stop, use);
#endif
  for (; begin < end; ++begin) multiply_tile(m, begin, in, first, stop, use);
}

}  // namespace
