// A tiled weight times many rows (prompts and batches), and how its codes come into tiles.

namespace {

constexpr int64_t BLOCK_BYTES = 1 << 19;  // of inputs that pass a tile at a time: they stay in the second cache

// Calls work(rank, size) on the threads of torch's operators, or on our own where `pool` is null.
template <class Work>
void on_threads(const Pool *pool, int threads, Work &work) {
  if (pool != nullptr) return on_pool(*pool, threads, work);
  with_team(threads, [&](Team &team) {
    auto share = [&](int rank) { work(rank, team.size); };
    team.run(share);
  });
}

// Where results go: y [rows][outputs].
struct Outputs {
  float *y;
  int64_t rows, outputs;

  // results [..][width], of R rows from `first` on and outputs from `begin` on; what is outside is left out.
  void store(const float *results, int R, int64_t first, int64_t begin, int64_t width) const {
    const int64_t num = std::min(width, outputs - begin);
    for (int64_t r = 0; r < std::min<int64_t>(R, rows - first); ++r)
      std::copy(results + r * width, results + r * width + num, y + (first + r) * outputs + begin);
  }
};

// R rows from `first` on times a tile.
template <int R>
void multiply(const Matrix &m, int64_t t, const Inputs &in, int64_t first, const Outputs &to) {
  float results[R * ROWS];
  product<R>(m, t, in, first, results);
  to.store(results, R, first, t * ROWS, ROWS);
}

void multiply(const Matrix &m, int64_t t, const Inputs &in, int64_t first, int64_t stop, const Outputs &to) {
  for (; first + MOST <= stop; first += MOST) multiply<MOST>(m, t, in, first, to);
  for (; first < stop; ++first) multiply<1>(m, t, in, first, to);
}

#if defined(__AVX2__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define PAIRS
// -- two tiles at a time, in registers of 64 bytes ----------------------------------------------------------

constexpr int PANEL = 16;  // rows of inputs at a time

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

// Rows first to first + R of the inputs, block by block: codes [block / 4][R][4], levels [R], sums [R]. What is multiplied
// together lies together.
template <int R>
void make_panel(const Inputs &in, int64_t first, int8_t *panel) {
  for (int64_t b = 0; b < in.blocks; ++b, panel += (in.block + 8) * R)
    for (int r = 0; r < R; ++r) {
      const int8_t *const x = in.codes.data() + (first + r) * in.width + b * in.block;
      for (int64_t k = 0; k < in.block; k += 4) __builtin_memcpy(panel + k * R + 4 * r, x + k, 4);
      __builtin_memcpy(panel + in.block * R + 4 * r, &in.level[(first + r) * in.blocks + b], 4);
      __builtin_memcpy(panel + (in.block + 4) * R + 4 * r, &in.sums[(first + r) * in.blocks + b], 4);
    }
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
    const __m512 zero = _mm512_cvtepi32_ps(widened_pair(m.zero + at, m.zero + below));
    const __m512 scale = pair(m.scale + at, m.scale + below);
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
        _mm512_storeu_ps(y, _mm512_fmadd_ps(exact, _mm512_mul_ps(scale, level), _mm512_loadu_ps(y)));
      }
      y -= R * 2 * ROWS, panel += 8 * R;
    }
  }
  if (m.bias)
    for (int r = 0; r < R; ++r, y += 2 * ROWS)
      _mm512_storeu_ps(y, _mm512_add_ps(_mm512_loadu_ps(y), _mm512_loadu_ps(m.bias + t * ROWS)));
}

// Panels of PANEL rows each; the last one has room for 4, 8 or PANEL.
struct Panels {
  const int64_t rows, bytes;  // bytes: of a row
  std::vector<int8_t> made;

  Panels(const Inputs &in, int64_t rows)
      : rows(rows), bytes(in.width + 8 * in.blocks), made((rows + PANEL - 1) / PANEL * PANEL * bytes) {}
  int64_t num() const { return (rows + PANEL - 1) / PANEL; }
  // Calls use(integral constant R, first row, panel) for panel i.
  template <class Use>
  void visit(int64_t i, Use use) {
    const int64_t first = i * PANEL, rest = rows - first;
    int8_t *const own = made.data() + first * bytes;
    if (rest <= 4) return use(std::integral_constant<int, 4>(), first, own);
    if (rest <= 8) return use(std::integral_constant<int, 8>(), first, own);
    use(std::integral_constant<int, PANEL>(), first, own);
  }
};

// Rows first to stop, from the start of a panel on, times tiles t and t + 1.
void multiply_pair(const Matrix &m, int64_t t, Panels &panels, int64_t first, int64_t stop, const Outputs &to) {
  const int64_t block = block_of(m.group);
  for (int64_t i = first / PANEL; i * PANEL < stop; ++i)
    panels.visit(i, [&](auto R, int64_t row, const int8_t *panel) {
      float results[R * 2 * ROWS];
      m.bits == 4 ? product_of_pair<4, R>(m, t, block, panel, results)
                  : product_of_pair<8, R>(m, t, block, panel, results);
      to.store(results, R, row, t * ROWS, 2 * ROWS);
    });
}
#endif

// A row of `bits`-bit codes as they are stored: code i is bits [i * bits, (i + 1) * bits) of the row's bytes.
void unpack(const uint8_t *stored, int64_t width, int64_t bits, uint8_t *codes) {
  if (bits == 8) {
    std::copy(stored, stored + width, codes);
  } else if (bits == 4) {
    for (int64_t i = 0; i < width / 2; ++i) codes[2 * i] = stored[i] & 15, codes[2 * i + 1] = stored[i] >> 4;
  } else {
    for (int64_t k = 0; k < width; k += 8, stored += bits) {
      uint32_t run = 0;
      for (int64_t i = 0; i < bits; ++i) run |= uint32_t{stored[i]} << (8 * i);
      for (int64_t i = 0; i < 8; ++i) codes[k + i] = run >> (bits * i) & ((1 << bits) - 1);
    }
  }
}

}  // namespace

// Stored codes [rows][width * bits / 8] in tiles; rows that fill the last tile are zeros.
extern "C" void tile_codes(const uint8_t *stored, int64_t rows, int64_t width, int64_t bits, uint8_t *tiles, int threads,
                           const Pool *pool) {
  const int64_t num = (rows + ROWS - 1) / ROWS, runs = width / 16, each = bits == 8 ? 1 : 2;  // runs of a piece
  auto work = [&](int64_t rank, int64_t size) {
    std::vector<uint8_t> codes(ROWS * width);
    for (int64_t t = num * rank / size; t < num * (rank + 1) / size; ++t) {
      for (int64_t row = 0; row < ROWS; ++row) {
        uint8_t *const own = codes.data() + row * width;
        if (t * ROWS + row < rows)
          unpack(stored + (t * ROWS + row) * (width * bits / 8), width, bits, own);
        else
          std::fill(own, own + width, uint8_t{0});
      }
      uint8_t *piece = tiles + t * (runs / each) * PIECE;
      for (int64_t run = 0; run < runs; run += each, piece += PIECE)
        for (int64_t quad = 0; quad < 4; ++quad)
          for (int64_t row = 0; row < ROWS; ++row) {
            const uint8_t *const from = codes.data() + row * width + 16 * run + 4 * quad;
            uint8_t *const to = piece + 32 * quad + 4 * row;
            for (int j = 0; j < 4; ++j) to[j] = each == 1 ? from[j] : from[j] | from[16 + j] << 4;
          }
    }
  };
  on_threads(pool, threads, work);
}

// Rows of the weight itself, y [num][width]: those of `index`, or the first `num` where that is null. Whether all exist.
extern "C" bool decode_tiles(const Matrix *m, const int64_t *index, int64_t num, float *y, int threads, const Pool *pool) {
  for (int64_t i = 0; index && i < num; ++i)
    if (index[i] < 0 || index[i] >= m->rows) return false;
  const int64_t groups = m->width / m->group, each = m->bits == 4 ? 2 : 1;  // runs of a piece
  auto work = [&](int64_t rank, int64_t size) {
    for (int64_t i = num * rank / size; i < num * (rank + 1) / size; ++i) {
      const int64_t n = index ? index[i] : i, t = n / ROWS, row = n % ROWS;
      const uint8_t *piece = m->codes + t * (m->width / 16 / each) * PIECE + 4 * row;
      float *const own = y + i * m->width;
      for (int64_t k = 0; k < m->width; k += 16 * each, piece += PIECE)
        for (int64_t j = 0; j < 16 * each; ++j) {
          const uint8_t byte = piece[32 * (j % 16 / 4) + j % 4], code = each == 1 ? byte : byte >> (j / 16 * 4) & 15;
          own[k + j] = code;
        }
      for (int64_t g = 0; g < groups; ++g) {
        const float scale = m->scale[(t * groups + g) * ROWS + row], zero = m->zero[(t * groups + g) * ROWS + row];
        for (int64_t k = g * m->group; k < (g + 1) * m->group; ++k) own[k] = (own[k] - zero) * scale;
      }
    }
  };
  num == 1 ? work(0, 1) : on_threads(pool, threads, work);
  return true;
}

// x [rows][m->width], y [rows][outputs]; m->rows is `outputs`, up to a multiple of 8. Every thread rounds its share of the
// rows, then multiplies all of them with its share of the tiles; a tile stays in the nearest cache while a block passes.
extern "C" void tiled_linear(const Matrix *m, const float *x, int64_t rows, float *y, int64_t outputs, int threads,
                             const Pool *pool) {
  const Outputs to{y, rows, outputs};
  const int64_t tiles = m->rows / ROWS;
  Inputs in;
#if defined(PAIRS)
  const int64_t block = std::max<int64_t>(BLOCK_BYTES / m->width / PANEL, 1) * PANEL;
  in.resize(rows + PANEL, m->width, m->group);  // of the rows behind the last one nothing is stored
  Panels panels(in, rows);
  auto round = [&](int64_t rank, int64_t size) {
    for (int64_t i = panels.num() * rank / size; i < panels.num() * (rank + 1) / size; ++i)
      panels.visit(i, [&](auto R, int64_t first, int8_t *panel) {
        for (int64_t r = first; r < std::min(rows, first + R); ++r) in.round(x + r * m->width, r);
        make_panel<R>(in, first, panel);
      });
  };
  auto multiply_all = [&](int64_t rank, int64_t size) {
    const int64_t num = (tiles + 1) / 2;
    for (int64_t first = 0; first < rows; first += block)
      for (int64_t t = 2 * (num * rank / size); t < 2 * (num * (rank + 1) / size); t += 2) {
        const int64_t stop = std::min(rows, first + block);
        if (t + 1 == tiles || rows == 1)
          for (int64_t i = t; i < std::min(t + 2, tiles); ++i) multiply(*m, i, in, first, stop, to);
        else
          multiply_pair(*m, t, panels, first, stop, to);
      }
  };
#else
  const int64_t block = std::max<int64_t>(BLOCK_BYTES / m->width / MOST, 1) * MOST;
  in.resize(rows, m->width, m->group);
  auto round = [&](int64_t rank, int64_t size) {
    for (int64_t r = rows * rank / size; r < rows * (rank + 1) / size; ++r) in.round(x + r * m->width, r);
  };
  auto multiply_all = [&](int64_t rank, int64_t size) {
    for (int64_t first = 0; first < rows; first += block)
      for (int64_t t = tiles * rank / size; t < tiles * (rank + 1) / size; ++t)
        multiply(*m, t, in, first, std::min(rows, first + block), to);
  };
#endif
  on_threads(pool, threads, round);
  on_threads(pool, threads, multiply_all);
}
