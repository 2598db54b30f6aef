// A tiled weight times many rows (prompts and batches), and how its codes come into tiles.

namespace {

constexpr int64_t BLOCK = 64;

// Calls work(rank, size) on the threads of torch's operators, or on our own where `pool` is null.
template <class Work>
void on_threads(const Pool *pool, int threads, Work &work) {
  if (pool != nullptr) return on_pool(*pool, threads, work);
  with_team(threads, [&](Team &team) {
    auto share = [&](int rank) { work(rank, team.size); };
    team.run(share);
  });
}

// y [rows][outputs] of the tile's outputs, R rows from `first` on.
template <int R>
void multiply(const Matrix &m, int64_t t, const Inputs &in, int64_t first, float *y, int64_t outputs) {
  float results[R * ROWS];
  product<R>(m, t, in, first, results);
  const int64_t num = std::min(ROWS, outputs - t * ROWS);
  for (int r = 0; r < R; ++r)
    std::copy(results + r * ROWS, results + r * ROWS + num, y + (first + r) * outputs + t * ROWS);
}

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

// Stored codes [rows][width * bits / 8] in tiles, and their sums [rows up to a multiple of 8][width / group]; rows that
// fill the last tile are zeros.
extern "C" void tile_codes(const uint8_t *stored, int64_t rows, int64_t width, int64_t bits, int64_t group,
                           uint8_t *tiles, int32_t *sums, int threads, const Pool *pool) {
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
        for (int64_t g = 0; g < width / group; ++g) {
          int32_t sum = 0;
          for (int64_t k = g * group; k < (g + 1) * group; ++k) sum += own[k];
          sums[(t * ROWS + row) * (width / group) + g] = sum;
        }
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

// The weight itself, [outputs][width].
extern "C" void decode_tiles(const Matrix *m, float *y, int64_t outputs, int threads, const Pool *pool) {
  const int64_t tiles = m->rows / ROWS, groups = m->width / m->group, each = m->bits == 4 ? 2 : 1;  // runs of a piece
  auto work = [&](int64_t rank, int64_t size) {
    for (int64_t t = tiles * rank / size; t < tiles * (rank + 1) / size; ++t)
      for (int64_t row = 0; row < std::min(ROWS, outputs - t * ROWS); ++row) {
        const uint8_t *piece = m->codes + t * (m->width / 16 / each) * PIECE + 4 * row;
        float *const own = y + (t * ROWS + row) * m->width;
        for (int64_t k = 0; k < m->width; k += 16 * each, piece += PIECE)
          for (int64_t i = 0; i < 16 * each; ++i) {
            const uint8_t byte = piece[32 * (i % 16 / 4) + i % 4], code = each == 1 ? byte : byte >> (i / 16 * 4) & 15;
            own[k + i] = code;
          }
        for (int64_t g = 0; g < groups; ++g) {
          const float scale = m->scale[(t * groups + g) * ROWS + row], zero = m->zero[(t * groups + g) * ROWS + row];
          for (int64_t k = g * m->group; k < (g + 1) * m->group; ++k) own[k] = (own[k] - zero) * scale;
        }
      }
  };
  on_threads(pool, threads, work);
}

// x [rows][m->width], y [rows][outputs]; m->rows is `outputs`, up to a multiple of 8. Every thread rounds its share of the
// rows, then multiplies all of them with its share of the tiles; a tile stays in the nearest cache while BLOCK rows pass.
extern "C" void tiled_linear(const Matrix *m, const float *x, int64_t rows, float *y, int64_t outputs, int threads,
                             const Pool *pool) {
  Inputs in;
  in.resize(rows, m->width, m->group);
  auto round = [&](int64_t rank, int64_t size) {
    for (int64_t r = rows * rank / size; r < rows * (rank + 1) / size; ++r) in.round(x + r * m->width, r);
  };
  auto multiply_all = [&](int64_t rank, int64_t size) {
    const int64_t tiles = m->rows / ROWS;
    for (int64_t block = 0; block < rows; block += BLOCK)
      for (int64_t t = tiles * rank / size; t < tiles * (rank + 1) / size; ++t) {
        const int64_t stop = std::min(rows, block + BLOCK);
        int64_t r = block;
        for (; r + MOST <= stop; r += MOST) multiply<MOST>(*m, t, in, r, y, outputs);
        for (; r < stop; ++r) multiply<1>(*m, t, in, r, y, outputs);
      }
  };
  on_threads(pool, threads, round);
  on_threads(pool, threads, multiply_all);
}
