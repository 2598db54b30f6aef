// Codes of gradients on a CPU: the loops of block_codes.py and top_magnitudes.py, bit for bit as their references.
//
// Sums must be the same on machines with other instructions, so no product is fused with an addition, and no sum is
// taken in another order than it is written in.

#if defined(__clang__)
#pragma clang fp contract(off)
#pragma clang fp reassociate(off)
#else
#pragma GCC optimize("fp-contract=off", "no-associative-math")
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace {

constexpr int64_t MAX_BLOCK = 1024, SAMPLE = 2048, PIECE = 64, GROUP = 16;
constexpr float TINY = 1e-30f, HUGE_VALUE = 3e38f, LARGEST_BF16 = 3.3895314e38f;

// Parts of [0, units) on so many threads; starting one takes about as long as 20,000 values.
template <class Work>
void parallel(int64_t units, int64_t threads, Work work) {
  threads = std::min(threads, units);
  if (threads <= 1) return work(int64_t{0}, units);
  std::vector<std::thread> others;
  for (int64_t t = 1; t < threads; ++t)
    others.emplace_back([=] { work(units * t / threads, units * (t + 1) / threads); });
  work(int64_t{0}, units / threads);
  for (auto &other : others) other.join();
}

// Values that vector code computes side by side; sums of them have as many parts.
typedef float Group __attribute__((vector_size(4 * GROUP)));

// As an integer, which has the order of |x|.
uint32_t magnitude(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }

float read_float(const uint8_t *from) {
  float value;
  std::memcpy(&value, from, 4);
  return value;
}

// -- blocks of integers with a scale -------------------------------------------------------------------------

// Codes of one block into `code`; returns its scale.
float encode_block(const float *x, int64_t block, float levels, int8_t *code) {
  uint32_t largest = 0;  // as integers: a maximum of floats does not become vector code here
  for (int64_t j = 0; j < block; ++j) largest = std::max(largest, magnitude(x[j]));
  float most = std::bit_cast<float>(largest);
  most = most < TINY ? 0.0f : std::min(most, HUGE_VALUE);
  float scale = most / levels;
  if (scale > 0)
    for (int64_t j = 0; j < block; ++j) {
      float step = std::rint(x[j] / scale);
      step = step > levels ? levels : step;
      step = step < -levels ? -levels : step;
      code[j] = static_cast<int8_t>(static_cast<int32_t>(step));
    }
  else
    std::fill_n(code, block, 0);
  return scale;
}

void pack_block(const int8_t *code, int64_t block, int64_t bits, uint8_t *out) {
  if (bits == 8) {
    std::memcpy(out, code, block);
    return;
  }
  int64_t half = block / 2;
  for (int64_t j = 0; j < half; ++j) out[j] = static_cast<uint8_t>((code[j] + 8) | ((code[j + half] + 8) << 4));
}

void decode_block(const uint8_t *packed, float scale, int64_t block, int64_t bits, float *out) {
  if (bits == 8) {
    for (int64_t j = 0; j < block; ++j) out[j] = static_cast<float>(static_cast<int8_t>(packed[j])) * scale;
    return;
  }
  int64_t half = block / 2;
  for (int64_t j = 0; j < half; ++j) out[j] = static_cast<float>((packed[j] & 15) - 8) * scale;
  for (int64_t j = 0; j < half; ++j) out[j + half] = static_cast<float>((packed[j] >> 4) - 8) * scale;
}

// -- the largest magnitudes of a row --------------------------------------------------------------------------

// Values of a row that may be among the largest, with their places; the memory serves all rows of a thread.
struct Kept {
  explicit Kept(int64_t num) : bits(num + 1), sorted(num + 1), at(num + 1) {}
  std::vector<uint32_t> bits, sorted;
  std::vector<int32_t> at;
};

// A magnitude that a few more than k of the row reach, but for one row in some ten thousand: from a sample.
uint32_t sampled_bound(const float *x, int64_t num, int64_t k, std::vector<uint32_t> &sample) {
  double expected = static_cast<double>(k) * SAMPLE / num;
  int64_t rank = static_cast<int64_t>(std::ceil(expected + 4 * std::sqrt(expected) + 8));
  if (num < 2 * SAMPLE || rank >= SAMPLE) return 0;
  int64_t stride = num / (SAMPLE / PIECE);
  for (int64_t s = 0; s < SAMPLE; ++s) sample[s] = magnitude(x[s / PIECE * stride + s % PIECE]);
  std::nth_element(sample.begin(), sample.begin() + rank - 1, sample.begin() + SAMPLE, std::greater<>());
  return sample[rank - 1];
}

int64_t keep_from(const float *x, int64_t num, uint32_t bound, Kept &kept) {
  int64_t count = 0;
  for (int64_t start = 0; start < num; start += GROUP) {
    int64_t end = std::min(start + GROUP, num);
    uint32_t most = 0;
    if (end - start == GROUP)
      for (int64_t i = 0; i < GROUP; ++i) most = std::max(most, magnitude(x[start + i]));
    else
      most = 0xffffffffu;
    if (most < bound) continue;
    for (int64_t i = start; i < end; ++i) {
      kept.bits[count] = magnitude(x[i]);
      kept.at[count] = static_cast<int32_t>(i);
      count += kept.bits[count] >= bound;
    }
  }
  return count;
}

// Places of the k largest in increasing order; of equal ones the first.
template <class Found>
void top_of_row(const float *x, int64_t num, int64_t k, Kept &kept, Found found) {
  int64_t count = keep_from(x, num, sampled_bound(x, num, k, kept.sorted), kept);
  if (count < k) count = keep_from(x, num, 0, kept);
  auto first = kept.sorted.begin();
  std::copy_n(kept.bits.begin(), count, first);
  std::nth_element(first, first + k - 1, first + count, std::greater<>());
  uint32_t threshold = first[k - 1];
  int64_t equal = k - std::count_if(first, first + k, [=](uint32_t b) { return b > threshold; });
  int64_t written = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (kept.bits[i] < threshold || (kept.bits[i] == threshold && equal-- <= 0)) continue;
    found(written++, kept.at[i]);
  }
}

uint16_t to_bf16(float x) {
  if (x != x) return 0x7fc0;
  uint32_t bits = std::bit_cast<uint32_t>(std::clamp(x, -LARGEST_BF16, LARGEST_BF16));
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

}  // namespace

extern "C" {

// x [rows, num] -> wire [rows, num * bits / 8 + num / block * 4]; error, where given, is x - decoded.
void encode_blocks(const float *x, uint8_t *wire, float *error, int64_t rows, int64_t num, int64_t bits, int64_t block,
                   int64_t threads) {
  int64_t per_row = num / block, cut = num * bits / 8, width = cut + 4 * per_row;
  parallel(rows * per_row, threads, [=](int64_t first, int64_t last) {
    int8_t code[MAX_BLOCK];
    for (int64_t u = first; u < last; ++u) {
      int64_t row = u / per_row, b = u % per_row;
      const float *values = x + u * block;
      uint8_t *codes = wire + row * width + b * (block * bits / 8);
      float scale = encode_block(values, block, bits == 8 ? 127.0f : 7.0f, code);
      pack_block(code, block, bits, codes);
      std::memcpy(wire + row * width + cut + 4 * b, &scale, 4);
      if (!error) continue;
      float *lost = error + u * block;
      for (int64_t j = 0; j < block; ++j) lost[j] = values[j] - static_cast<float>(code[j]) * scale;
    }
  });
}

// Rows of `stride` bytes -> out [rows, num].
void decode_blocks(const uint8_t *wire, int64_t stride, float *out, int64_t rows, int64_t num, int64_t bits,
                   int64_t block, int64_t threads) {
  int64_t per_row = num / block, cut = num * bits / 8, packed = block * bits / 8;
  parallel(rows * per_row, threads, [=](int64_t first, int64_t last) {
    for (int64_t u = first; u < last; ++u) {
      const uint8_t *row = wire + u / per_row * stride;
      int64_t b = u % per_row;
      decode_block(row + b * packed, read_float(row + cut + 4 * b), block, bits, out + u * block);
    }
  });
}

// out [num]: the sum of the decoded rows in their order, where row `own` is taken from `exact`.
void sum_blocks(const uint8_t *wire, int64_t stride, const float *exact, int64_t own, float *out, int64_t rows,
                int64_t num, int64_t bits, int64_t block, int64_t threads) {
  int64_t cut = num * bits / 8, packed = block * bits / 8;
  parallel(num / block, threads, [=](int64_t first, int64_t last) {
    float part[MAX_BLOCK];
    for (int64_t b = first; b < last; ++b) {
      float *total = out + b * block;
      for (int64_t r = 0; r < rows; ++r) {
        const uint8_t *row = wire + r * stride;
        const float *add = exact + b * block;
        if (r != own) {
          decode_block(row + b * packed, read_float(row + cut + 4 * b), block, bits, part);
          add = part;
        }
        if (r == 0)
          std::memcpy(total, add, 4 * block);
        else
          for (int64_t j = 0; j < block; ++j) total[j] += add[j];
      }
    }
  });
}

// Adds each tensor g, of num values, to its e. out [tensors, 3] gets |g|^2, |e|^2 and their product afterwards: on the
// way they cost no time.
void add_moments(float *const *es, const float *const *gs, const int64_t *num, float *out, int64_t tensors) {
  for (int64_t t = 0; t < tensors; ++t) {
    Group gg = {}, ee = {}, ge = {}, left, right;
    float *e = es[t];
    const float *g = gs[t];
    int64_t whole = num[t] / GROUP * GROUP;
    for (int64_t i = 0; i < whole; i += GROUP) {
      std::memcpy(&left, e + i, sizeof left);
      std::memcpy(&right, g + i, sizeof right);
      left += right;
      std::memcpy(e + i, &left, sizeof left);
      gg += right * right;
      ee += left * left;
      ge += left * right;
    }
    double sums[3] = {};
    for (int64_t j = 0; j < GROUP; ++j) sums[0] += gg[j], sums[1] += ee[j], sums[2] += ge[j];
    for (int64_t i = whole; i < num[t]; ++i) {
      e[i] += g[i];
      sums[0] += g[i] * g[i], sums[1] += e[i] * e[i], sums[2] += g[i] * e[i];
    }
    for (int64_t m = 0; m < 3; ++m) out[3 * t + m] = static_cast<float>(sums[m]);
  }
}

// index [rows, k], of rows [rows, num].
void top_magnitudes(const float *x, int64_t *index, int64_t rows, int64_t num, int64_t k, int64_t threads) {
  parallel(rows, threads, [=](int64_t first, int64_t last) {
    Kept kept(num);
    for (int64_t r = first; r < last; ++r)
      top_of_row(x + r * num, num, k, kept, [&](int64_t j, int32_t at) { index[r * k + j] = at; });
  });
}

// The largest k of each row of rows [rows, num] in bf16 into `values` and their places, less 2^15, into `places`;
// error, where given, is x less what is sent; it may be x itself.
void encode_top(const float *x, uint16_t *values, int16_t *places, float *error, int64_t rows, int64_t num, int64_t k,
                int64_t threads) {
  parallel(rows, threads, [=](int64_t first, int64_t last) {
    Kept kept(num);
    for (int64_t r = first; r < last; ++r) {
      const float *row = x + r * num;
      if (error && error != x) std::memcpy(error + r * num, row, 4 * num);
      top_of_row(row, num, k, kept, [&](int64_t j, int32_t at) {
        uint16_t value = to_bf16(row[at]);
        values[r * k + j] = value;
        places[r * k + j] = static_cast<int16_t>(at - 32768);
        if (error) error[r * num + at] = row[at] - from_bf16(value);
      });
    }
  });
}

// out [rows, num] = the sum of what `senders` messages hold for these rows, one after the other. In a message, which
// begins `stride` bytes after the one before, values and places begin at these bytes.
void sum_top(const uint8_t *wire, int64_t stride, int64_t senders, int64_t values_at, int64_t places_at, float *out,
             int64_t rows, int64_t num, int64_t k, int64_t threads) {
  parallel(rows, threads, [=](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      std::fill_n(out + r * num, num, 0.0f);
      for (int64_t s = 0; s < senders; ++s) {
        const uint8_t *values = wire + s * stride + values_at + 2 * r * k;
        const uint8_t *places = wire + s * stride + places_at + 2 * r * k;
        for (int64_t j = 0; j < k; ++j) {
          uint16_t value;
          int16_t place;
          std::memcpy(&value, values + 2 * j, 2);
          std::memcpy(&place, places + 2 * j, 2);
          int64_t at = place + 32768;
          if (at < num) out[r * num + at] += from_bf16(value);
        }
      }
    }
  });
}
}
