// A tiled weight times many rows: prompts and batches. Every thread rounds its share of the rows, then multiplies them
// with its share of the tiles; a tile stays in the nearest cache while BLOCK rows pass.

namespace {

constexpr int64_t BLOCK = 64;

// y [rows][outputs] of the tile's outputs, R rows from `first` on.
template <int R>
void multiply(const Matrix &m, int64_t t, const Inputs &in, int64_t first, float *y, int64_t outputs) {
  float results[R * ROWS];
  product<R>(m, t, in, first, results);
  const int64_t num = std::min(ROWS, outputs - t * ROWS);
  for (int r = 0; r < R; ++r)
    std::copy(results + r * ROWS, results + r * ROWS + num, y + (first + r) * outputs + t * ROWS);
}

}  // namespace

// x [rows][m->width], y [rows][outputs]; m->rows is `outputs`, up to a multiple of 8. `pool`: may be null.
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
  if (pool != nullptr) {
    on_pool(*pool, threads, round);
    on_pool(*pool, threads, multiply_all);
    return;
  }
  with_team(threads, [&](Team &team) {
    auto work = [&](int rank) {
      round(rank, team.size);
      team.meet();
      multiply_all(rank, team.size);
    };
    team.run(work);
  });
}
