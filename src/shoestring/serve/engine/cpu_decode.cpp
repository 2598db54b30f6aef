// A few rows (the next tokens of requests, drafts that are checked) through a decoder whose weights are 4- or 8-bit
// integers, in one call (after tiles.h).
//
//   every thread runs the same program; barriers (five a layer, six for several rows) precede reads of what other
//   threads wrote
//   rows of inputs are rounded to 8 bits by every thread
//   what a row gives does not depend on the others, to the bit
//
// The layer is that of cpu_decode.py's COMPILED: RMSNorm before a sublayer, after it or both, RoPE on a part of each head
// or none, windows, soft caps, gated layers; the same sizes and eps in all layers.

#include <bit>
#include <initializer_list>

namespace {

constexpr int64_t RUN = 16;
constexpr float LEAST = -1e30f;

struct Layer {
  const float *attn_norm, *q_norm, *k_norm, *mlp_norm, *attn_post_norm, *mlp_post_norm;  // each may be null
  Matrix q, k, v, out, gate, up, down;
  float *keys, *values;                                 // [blocks][block_size][groups][head_dim]
  int64_t rope, window;                                 // rope: which one, -1: none; window: positions, 0: all
};

struct Model {
  int64_t width, heads, groups, head_dim, hidden, num_layers, block_size;
  int64_t num_ropes, pairs;  // pairs: of dims that are rotated, from the first
  int64_t act, norm_width;   // act: 0 SiLU, 1 GELU by tanh, 2 GELU; norm_width: q and k are normed over all heads
  const float *frequencies;  // [num_ropes][pairs]
  const float *table_scale;  // [num_ropes]: of cosines and sines
  const float *norm;
  const Layer *layers;
  Matrix head;
  float eps, scale, softcap;  // scale: of the scores; softcap: 0: none
};

// -- the rest of a layer ------------------------------------------------------------------------------------

typedef float Four __attribute__((vector_size(16)));

Four load(const float *x) {
  Four four;
  __builtin_memcpy(&four, x, sizeof four);
  return four;
}

// Sixteen independent sums, so that additions overlap; `num` is a multiple of 16.
float dot(const float *a, const float *b, int64_t num) {
  Four sum[4] = {};
  for (int64_t i = 0; i < num; i += LANES)
    for (int j = 0; j < 4; ++j) sum[j] += load(a + i + 4 * j) * load(b + i + 4 * j);
  const Four all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  return (all[0] + all[1]) + (all[2] + all[3]);
}

Wide load_wide(const float *x) {
  Wide wide;
  __builtin_memcpy(&wide, x, sizeof wide);
  return wide;
}

// Four products at once: one read of `a` serves all of them. `num` is a multiple of 16.
Four dots(const float *a, const float *const *b, int64_t num) {
  Wide sum[4][2] = {};
  for (int64_t i = 0; i < num; i += LANES)
    for (int half = 0; half < 2; ++half)
      for (int row = 0; row < 4; ++row)
        sum[row][half] += load_wide(a + i + WIDE * half) * load_wide(b[row] + i + WIDE * half);
  Four all;
  for (int row = 0; row < 4; ++row) {
    const Wide both = sum[row][0] + sum[row][1];
    all[row] = ((both[0] + both[4]) + (both[1] + both[5])) + ((both[2] + both[6]) + (both[3] + both[7]));
  }
  return all;
}

// exp to 4e-7 (4e-6 for large x without fused multiply-add), in code that vectorizes; nan stays nan.
inline float exponential(float x) {
  x = x < -87 ? -87 : x > 88 ? 88 : x;
  const float n = std::nearbyint(x * 1.44269504f), r = x - n * 0.69314718f;
  const float p = 1 + r * (1 + r * (1 / 2.f + r * (1 / 6.f + r * (1 / 24.f + r * (1 / 120.f + r / 720)))));
  return p * std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
}

float inverse_rms(const float *x, int64_t width, float eps) {
  return 1 / std::sqrt(dot(x, x, width) / static_cast<float>(width) + eps);
}

void norm(const float *x, const float *weight, int64_t width, float eps, float *y) {
  const float scale = inverse_rms(x, width, eps);
  for (int64_t i = 0; i < width; ++i) y[i] = x[i] * scale * weight[i];
}

inline float activate(float x, int64_t act) {
  if (act == 0) return x / (1 + exponential(-x));
  if (act == 1) return x / (1 + exponential(-1.59576912f * (x + 0.044715f * x * x * x)));
  return 0.5f * x * (1 + std::erf(x * 0.70710678f));
}

// Attention over one thread's positions: the sums of exp(score - top) and of values weighted with it.
struct Partial {
  std::vector<float> top, sum, values;
};

// Where a row stands.
struct Place {
  int64_t position;
  std::vector<int64_t> at;          // offset of each position up to this one in keys and in values
  std::vector<float> cosine, sine;  // [num_ropes][pairs]

  Place(const Model &m, int64_t position, const int64_t *blocks)
      : position(position), at(position + 1), cosine(m.num_ropes * m.pairs), sine(m.num_ropes * m.pairs) {
    for (int64_t s = 0; s <= position; ++s)
      at[s] = (blocks[s / m.block_size] * m.block_size + s % m.block_size) * m.groups * m.head_dim;
    for (int64_t i = 0; i < m.num_ropes * m.pairs; ++i) {
      const float angle = static_cast<float>(position) * m.frequencies[i], scale = m.table_scale[i / m.pairs];
      cosine[i] = scale * std::cos(angle), sine[i] = scale * std::sin(angle);
    }
  }
};

// Rows that a call computes, and those of which it gives results.
struct Rows {
  int64_t num;
  const float *embedding;        // [num][width]
  const int64_t *positions;      // [num]
  const int64_t *const *blocks;  // [num]: a table each, the same one for rows of one request, which are neighbours
  int64_t num_wanted;
  const int64_t *wanted;  // [num_wanted]
};

struct Step {
  const Model &model;
  const Rows &rows;
  Team &team;
  float *result;
  const int64_t attended_width, qkv_width;
  std::vector<float> x, qkv, hidden, added;  // of each row; added: a sublayer's result before the norm after it
  std::vector<Place> places;                 // of each row
  std::vector<Partial> partial;              // of each row and thread

  Step(const Model &m, const Rows &rows, Team &team, float *result)
      : model(m), rows(rows), team(team), result(result), attended_width(m.heads * m.head_dim),
        qkv_width(m.layers->q.rows + m.layers->k.rows + m.layers->v.rows),
        x(rows.embedding, rows.embedding + rows.num * m.width), qkv(rows.num * qkv_width), hidden(rows.num * m.hidden),
        added(rows.num * m.width),
        partial(rows.num * team.size,
                {std::vector<float>(m.heads), std::vector<float>(m.heads), std::vector<float>(attended_width)}) {
    for (int64_t r = 0; r < rows.num; ++r) places.emplace_back(m, rows.positions[r], rows.blocks[r]);
  }

  // Calls use(row of inputs, first output, results, their number) for this thread's share of the tiles of matrices that lie
  // one below the other.
  template <class Use>
  void multiply(std::initializer_list<const Matrix *> matrices, Inputs &in, int rank, Use use) const {
    int64_t num = 0, above = 0;
    for (const Matrix *m : matrices) num += m->rows / ROWS;
    const int64_t begin = num * rank / team.size, end = num * (rank + 1) / team.size;
    for (const Matrix *m : matrices) {
      const int64_t tiles = m->rows / ROWS;
      multiply_tiles(*m, std::max(begin - above, int64_t{0}), std::min(end - above, tiles), in, 0, in.rows,
                     [&](int64_t row, int64_t n, const float *y, int64_t count) { use(row, above * ROWS + n, y, count); });
      above += tiles;
    }
  }

  // This thread's share of act(gate x) * up x, some tiles of each in turn: runs of memory are read in its order.
  void multiply_gated(const Matrix &gate, const Matrix &up, Inputs &in, int rank) {
    constexpr int64_t EACH = 16;
    const int64_t tiles = gate.rows / ROWS, end = tiles * (rank + 1) / team.size;
    for (int64_t begin = tiles * rank / team.size; begin < end; begin += EACH) {
      const int64_t stop = std::min(begin + EACH, end);
      multiply_tiles(gate, begin, stop, in, 0, rows.num, [this](int64_t row, int64_t n, const float *y, int64_t num) {
        std::copy(y, y + num, hidden.data() + row * model.hidden + n);
      });
      multiply_tiles(up, begin, stop, in, 0, rows.num, [this](int64_t row, int64_t n, const float *y, int64_t num) {
        float *const gated = hidden.data() + row * model.hidden + n;
        for (int i = 0; i < num; ++i) gated[i] = activate(gated[i], model.act) * y[i];
      });
    }
  }

  // Head h of `part`, `num` heads of queries or keys: normed where the model has such norms, then rotated to the position.
  void rotate(const Layer &layer, const Place &place, const float *part, int64_t num, int64_t h, const float *weight,
              float *y) const {
    const int64_t width = model.head_dim, half = model.pairs;
    const float *head = part + h * width;
    if (weight && model.norm_width) {
      const float scale = inverse_rms(part, num * width, model.eps);
      for (int64_t i = 0; i < width; ++i) y[i] = head[i] * scale * weight[h * width + i];
      head = y;
    } else if (weight) {
      norm(head, weight, width, model.eps, y);
      head = y;
    }
    if (head != y) std::copy(head, head + width, y);
    if (layer.rope < 0) return;
    const float *c = place.cosine.data() + layer.rope * half, *s = place.sine.data() + layer.rope * half;
    for (int64_t i = 0; i < half; ++i) {
      const float a = y[i], b = y[half + i];
      y[i] = a * c[i] - b * s[i];
      y[half + i] = b * c[i] + a * s[i];
    }
  }

  // Adds the values of positions begin to end to the sums of HEADS heads of a group: one read of a value serves all.
  template <int HEADS>
  void weigh(const Place &place, const float *score, int64_t stride, const float *values, int64_t begin, int64_t end,
             float *y) const {
    const int64_t width = model.head_dim, pairs = width / (2 * LANES) * (2 * LANES);
    for (int64_t i = 0; i < pairs; i += 2 * LANES)
      weigh_dims<HEADS, 2 * LANES>(place, score, stride, values + i, begin, end, y + i);
    if (pairs < width) weigh_dims<HEADS, LANES>(place, score, stride, values + pairs, begin, end, y + pairs);
  }
  template <int HEADS, int DIMS>
  void weigh_dims(const Place &place, const float *score, int64_t stride, const float *values, int64_t begin, int64_t end,
                  float *y) const {
    const int64_t width = model.head_dim;
    Wide sum[HEADS][DIMS / WIDE];
    for (int h = 0; h < HEADS; ++h) __builtin_memcpy(sum[h], y + h * width, sizeof sum[h]);
    for (int64_t s = begin; s < end; ++s)
      for (int j = 0; j < DIMS / WIDE; ++j) {
        const Wide value = load_wide(values + place.at[s] + WIDE * j);
        for (int h = 0; h < HEADS; ++h) sum[h][j] += score[h * stride + s] * value;
      }
    for (int h = 0; h < HEADS; ++h) __builtin_memcpy(y + h * width, sum[h], sizeof sum[h]);
  }

  void store_keys(const Layer &layer, int64_t row) const {
    const int64_t width = model.head_dim, heads = model.heads, groups = model.groups;
    const Place &place = places[row];
    const float *const own = qkv.data() + row * qkv_width;
    const int64_t at = place.at[place.position];
    for (int64_t g = 0; g < groups; ++g)
      rotate(layer, place, own + heads * width, groups, g, layer.k_norm, layer.keys + at + g * width);
    std::copy(own + (heads + groups) * width, own + (heads + 2 * groups) * width, layer.values + at);
  }

  // This thread's share of the positions that a row sees, and its place in the scratch memory.
  struct Share {
    const Place &place;
    int64_t begin, end;
    float *queries;  // [heads][head_dim]
    float *scores;   // [heads][end - begin]
  };

  std::vector<Share> shares_of(const Layer &layer, int64_t begin_row, int64_t end_row, int rank,
                               std::vector<float> &scratch) const {
    std::vector<Share> shares;
    int64_t size = 0;
    for (int64_t row = begin_row; row < end_row; ++row) {
      const int64_t position = places[row].position;
      const int64_t first = layer.window && position >= layer.window ? position + 1 - layer.window : 0;
      const int64_t seen = position + 1 - first;
      const int64_t begin = first + seen * rank / team.size, end = first + seen * (rank + 1) / team.size;
      shares.push_back({places[row], begin, end, nullptr, nullptr});
      size += model.heads * (model.head_dim + end - begin);
    }
    scratch.resize(size);
    float *free = scratch.data();
    for (Share &share : shares) {
      share.queries = free, share.scores = free + model.heads * model.head_dim;
      free = share.scores + model.heads * (share.end - share.begin);
    }
    return shares;
  }

  // All query heads of rows of one request over this thread's shares of the positions. Keys and values are read in runs
  // that stay in the processor's nearest cache while the rows pass.
  void attend(const Layer &layer, int64_t begin_row, int64_t end_row, int rank, std::vector<float> &scratch) {
    const int64_t width = model.head_dim, heads = model.heads, each = heads / model.groups;
    const std::vector<Share> shares = shares_of(layer, begin_row, end_row, rank, scratch);
    const int64_t num = end_row - begin_row;
    if (rows.num == 1 && shares[0].end > shares[0].place.position) store_keys(layer, 0);  // no other thread reads them
    for (int64_t r = 0; r < num; ++r)
      for (int64_t h = 0; h < heads; ++h)
        rotate(layer, shares[r].place, qkv.data() + (begin_row + r) * qkv_width, heads, h, layer.q_norm,
               shares[r].queries + h * width);
    const int64_t from = shares.front().begin, to = shares.back().end;  // later rows begin and end later
    for (int64_t run = from; run < to; run += RUN)
      for (const Share &share : shares)
        for (int64_t s = std::max(run, share.begin), stop = std::min(run + RUN, share.end); s < stop; s += 4)
          score(layer, share, s, std::min<int64_t>(4, stop - s));
    for (int64_t r = 0; r < num; ++r) {
      Partial &part = partial[(begin_row + r) * team.size + rank];
      for (int64_t h = 0; h < heads; ++h) soften(shares[r], h, part);
      std::fill(part.values.begin(), part.values.end(), 0.f);
    }
    for (int64_t run = from; run < to; run += RUN)
      for (int64_t r = 0; r < num; ++r) {
        const Share &share = shares[r];
        const int64_t begin = std::max(run, share.begin), end = std::min(run + RUN, share.end);
        const int64_t stride = share.end - share.begin;
        const float *weights = share.scores - share.begin;
        float *y = partial[(begin_row + r) * team.size + rank].values.data();
        for (int64_t g = 0; g < model.groups && begin < end; ++g) {
          const float *const values = layer.values + g * width;
          int64_t h = 0;
          for (; h + 2 <= each; h += 2, weights += 2 * stride, y += 2 * width)
            weigh<2>(share.place, weights, stride, values, begin, end, y);
          for (; h < each; ++h, weights += stride, y += width)
            weigh<1>(share.place, weights, stride, values, begin, end, y);
        }
      }
  }

  // Scores of all heads at `num` positions, four at most, from s on.
  void score(const Layer &layer, const Share &share, int64_t s, int64_t num) const {
    const int64_t width = model.head_dim, each = model.heads / model.groups, stride = share.end - share.begin;
    const float *keys[4], *query = share.queries;
    float *to = share.scores + s - share.begin;
    for (int64_t i = 0; i < 4; ++i) keys[i] = layer.keys + share.place.at[s + std::min(i, num - 1)];  // the last one again
    for (int64_t g = 0; g < model.groups; ++g) {
      for (int64_t h = 0; h < each; ++h, query += width, to += stride) {
        const Four four = model.scale * dots(query, keys, width);
        if (num == 4)
          __builtin_memcpy(to, &four, sizeof four);
        else
          for (int64_t i = 0; i < num; ++i) to[i] = four[i];
      }
      for (const float *&key : keys) key += width;
    }
  }

  // exp(score - top) of head h in place of its scores; top and sum go to `part`.
  void soften(const Share &share, int64_t h, Partial &part) const {
    const int64_t num = share.end - share.begin;
    float *const scores = share.scores + h * num;
    float top = LEAST, sum = 0;
    if (model.softcap != 0)
      for (int64_t s = 0; s < num; ++s) scores[s] = model.softcap * std::tanh(scores[s] / model.softcap);
    for (int64_t s = 0; s < num; ++s) top = scores[s] > top ? scores[s] : top;
    for (int64_t s = 0; s < num; ++s) scores[s] = exponential(scores[s] - top);
    for (int64_t s = 0; s < num; ++s) sum += scores[s];
    part.top[h] = top, part.sum[h] = sum;
  }

  // Combines the partial attention of all threads.
  void combine(int64_t row, float *attended) const {
    const int64_t width = model.head_dim;
    const Partial *const begin = partial.data() + row * team.size, *const end = begin + team.size;
    for (int64_t h = 0; h < model.heads; ++h) {
      float top = LEAST, sum = 0, *y = attended + h * width;
      for (const Partial *part = begin; part < end; ++part) top = std::max(top, part->top[h]);
      for (const Partial *part = begin; part < end; ++part) sum += part->sum[h] * exponential(part->top[h] - top);
      for (int64_t i = 0; i < width; ++i) y[i] = 0;
      for (const Partial *part = begin; part < end; ++part) {
        const float weight = exponential(part->top[h] - top) / sum;
        for (int64_t i = 0; i < width; ++i) y[i] += weight * part->values[h * width + i];
      }
    }
  }

  void operator()(int rank) {
    const int64_t num = rows.num, width = model.width;
    std::vector<float> normed(num * width), attended(num * attended_width), scratch;
    Inputs in;
    const auto round = [&in](const std::vector<float> &from, int64_t num_rows, const Matrix &m) {
      in.resize(num_rows, m.width, m.group);
      for (int64_t i = 0; i < in.num_panels(); ++i) in.read(from.data(), i);
    };
    // What a sublayer reads.
    const auto read = [&](const float *weight, const Matrix &m) {
      for (int64_t r = 0; weight && r < num; ++r)
        norm(x.data() + r * width, weight, width, model.eps, normed.data() + r * width);
      round(weight ? normed : x, num, m);
    };
    // x += m times the inputs, normed where `post` is given.
    const auto add = [&](const Matrix &m, const float *post) {
      multiply({&m}, in, rank, [&](int64_t row, int64_t n, const float *y, int64_t count) {
        float *const to = (post ? added : x).data() + row * width + n;
        for (int i = 0; i < count; ++i) to[i] = post ? y[i] : to[i] + y[i];
      });
      team.meet();
      if (!post) return;
      for (int64_t r = 0; r < num; ++r) {
        const float *const own = added.data() + r * width, scale = inverse_rms(own, width, model.eps);
        for (int64_t i = width * rank / team.size; i < width * (rank + 1) / team.size; ++i)
          x[r * width + i] += own[i] * scale * post[i];
      }
      team.meet();
    };
    for (int64_t index = 0; index < model.num_layers; ++index) {
      const Layer &layer = model.layers[index];
      read(layer.attn_norm, layer.q);
      multiply({&layer.q, &layer.k, &layer.v}, in, rank, [this](int64_t row, int64_t n, const float *y, int64_t count) {
        std::copy(y, y + count, qkv.data() + row * qkv_width + n);
      });
      team.meet();
      if (num > 1) {  // rows of one request read each other's
        for (int64_t r = rank; r < num; r += team.size) store_keys(layer, r);
        team.meet();
      }
      for (int64_t begin = 0, end = 0; begin < num; begin = end) {  // the rows of a request
        while (end < num && rows.blocks[end] == rows.blocks[begin]) ++end;
        attend(layer, begin, end, rank, scratch);
      }
      team.meet();
      for (int64_t r = 0; r < num; ++r) combine(r, attended.data() + r * attended_width);
      round(attended, num, layer.out);
      add(layer.out, layer.attn_post_norm);
      read(layer.mlp_norm, layer.gate);
      multiply_gated(layer.gate, layer.up, in, rank);
      team.meet();
      round(hidden, num, layer.down);
      add(layer.down, layer.mlp_post_norm);
    }
    for (int64_t i = 0; i < rows.num_wanted; ++i)
      norm(x.data() + rows.wanted[i] * width, model.norm, width, model.eps, normed.data() + i * width);
    if (model.head.rows == 0) {
      if (rank == 0) std::copy(normed.begin(), normed.begin() + rows.num_wanted * width, result);
      return;
    }
    round(normed, rows.num_wanted, model.head);
    multiply({&model.head}, in, rank, [this](int64_t row, int64_t n, const float *y, int64_t count) {
      std::copy(y, y + count, result + row * model.head.rows + n);
    });
  }
};

}  // namespace

// `result`, for each wanted row: logits [head.rows], or the normed row [width] where head.rows is 0.
extern "C" void rows_step(const Model *model, const Rows *rows, float *result, int threads) {
  with_team(threads, [&](Team &team) {
    Step step(*model, *rows, team, result);
    team.run(step);
  });
}
