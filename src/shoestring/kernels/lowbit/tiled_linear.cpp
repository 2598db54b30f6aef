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
        const int64_t at = (t * groups + g) * ROWS;
        const float scale = m->scale[at + row], zero = zeros_of(*m, at)[row], offset = m->offset ? m->offset[at + row] : 0;
        for (int64_t k = g * m->group; k < (g + 1) * m->group; ++k) own[k] = (own[k] - zero) * scale + offset;
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
  const int64_t tiles = m->rows / ROWS, panels = std::max<int64_t>(BLOCK_BYTES / m->width / PANEL, 1);
  Inputs in;
  in.resize(rows, m->width, m->group);
  auto read = [&](int64_t rank, int64_t size) {
    for (int64_t i = in.num_panels() * rank / size; i < in.num_panels() * (rank + 1) / size; ++i) in.read(x, i);
  };
  auto multiply = [&](int64_t rank, int64_t size) {
    const auto store = [&](int64_t row, int64_t n, const float *results, int64_t num) {
      std::copy(results, results + std::min(num, outputs - n), y + row * outputs + n);
    };
    for (int64_t first = 0; first < rows; first += panels * PANEL)
      multiply_tiles(*m, tiles * rank / size, tiles * (rank + 1) / size, in, first,
                     std::min(rows, first + panels * PANEL), store);
  };
  on_threads(pool, threads, read);
  on_threads(pool, threads, multiply);
}
