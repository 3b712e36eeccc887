#include "cpu/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/dispatch.h"
#include "exact_buffer.h"

namespace quire::cpu {
namespace {

using test::ExactBuffer;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// fp32 -> bfloat16 by its definition: of the two neighbours the nearer one, of two as near the even.
uint16_t nearest_bfloat16(uint32_t bits) {
  if (std::isnan(float_of(bits))) {
    return 0x7fc0;
  }
  const uint32_t below = bits >> 16;
  const uint32_t rest = bits & 0xffff;
  const bool up = rest > 0x8000 || (rest == 0x8000 && below % 2 == 1);
  return static_cast<uint16_t>(below + up);
}

void for_each_set(const std::function<void(const Kernels&)>& body) {
  for (const std::string& name : available()) {
    body(select(name));
  }
}

// Random numbers in [-1, 1), which bfloat16 holds exactly.
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : random_(seed) {}
  float next() { return static_cast<float>(static_cast<int>(random_() % 256) - 128) / 128.0f; }

 private:
  std::mt19937_64 random_;
};

// One sequence's K and V of one layer, in buffers that begin with the first row that is seen and end
// where the last row ends, and queries for its last rows.
struct Case {
  HeadShape shape;
  Softmax softmax;
  size_t tokens;
  size_t rows;  // queries stand at the last `rows` positions
  size_t first;
  float scale;
  ExactBuffer<std::byte> keys;
  ExactBuffer<std::byte> values;
  ExactBuffer<float> queries;  // [rows][query_heads][head_dim]

  Case(HeadShape s, size_t tokens, size_t rows, float spread = 1.0f, Softmax softmax = {})
      : shape(s),
        softmax(softmax),
        tokens(tokens),
        rows(rows),
        first(softmax.first_seen(tokens - rows)),
        scale(spread / std::sqrt(static_cast<float>(s.head_dim))),
        keys((tokens - first) * s.row_bytes()),
        values((tokens - first) * s.row_bytes()),
        queries(rows * s.query_floats()) {
    Numbers numbers(tokens * 1000003 + s.head_dim * 31 + s.query_heads);
    for (size_t i = 0; i < (tokens - first) * s.row_elements(); ++i) {
      set(keys, i, numbers.next());
      set(values, i, numbers.next());
    }
    for (size_t i = 0; i < queries.size(); ++i) {
      queries[i] = numbers.next();
    }
  }

  size_t position(size_t row) const { return tokens - rows + row; }
  // Where position 0 of K or V would stand.
  const std::byte* origin(const ExactBuffer<std::byte>& rows) const {
    return rows.data() - first * shape.row_bytes();
  }
  void set(ExactBuffer<std::byte>& rows, size_t i, float x) const {
    const uint32_t bits = bits_of(x);
    if (shape.type == KVType::bfloat16) {
      const auto half = static_cast<uint16_t>(bits >> 16);
      std::memcpy(rows.data() + 2 * i, &half, sizeof(half));
    } else {
      std::memcpy(rows.data() + 4 * i, &bits, sizeof(bits));
    }
  }
  double get(const ExactBuffer<std::byte>& rows, size_t token, size_t kv_head, size_t i) const {
    const size_t at = ((token - first) * shape.kv_heads + kv_head) * shape.head_dim + i;
    uint32_t bits = 0;
    if (shape.type == KVType::bfloat16) {
      uint16_t half;
      std::memcpy(&half, rows.data() + 2 * at, sizeof(half));
      bits = static_cast<uint32_t>(half) << 16;
    } else {
      std::memcpy(&bits, rows.data() + 4 * at, sizeof(bits));
    }
    return float_of(bits);
  }

  // The attention of one row and head, by its definition, in double precision.
  std::vector<double> expected(size_t row, size_t head) const {
    const size_t kv_head = head / shape.group();
    const float* query = queries.data() + row * shape.query_floats() + head * shape.head_dim;
    const size_t from = softmax.first_seen(position(row));
    std::vector<double> scores(position(row) + 1 - from);
    for (size_t t = 0; t < scores.size(); ++t) {
      double dot = 0;
      for (size_t i = 0; i < shape.head_dim; ++i) {
        dot += static_cast<double>(query[i]) * get(keys, from + t, kv_head, i);
      }
      const auto cap = static_cast<double>(softmax.softcap);
      scores[t] = dot * static_cast<double>(scale);
      scores[t] = cap == 0 ? scores[t] : cap * std::tanh(scores[t] / cap);
    }
    const double highest = *std::max_element(scores.begin(), scores.end());
    double weight = 0;
    if (softmax.sinks != nullptr) {
      weight = std::exp(static_cast<double>(softmax.sinks[head]) - highest);
    }
    std::vector<double> out(shape.head_dim, 0.0);
    for (size_t t = 0; t < scores.size(); ++t) {
      const double w = std::exp(scores[t] - highest);
      weight += w;
      for (size_t i = 0; i < shape.head_dim; ++i) {
        out[i] += w * get(values, from + t, kv_head, i);
      }
    }
    for (double& x : out) {
      x /= weight;
    }
    return out;
  }

  // Whether `result` [query_heads][head_dim] is what row `row` should be.
  bool good(size_t row, const float* result) const {
    // The rounding of a score is of its size: large scores leave less of a weight's digits.
    const double tolerance = 2e-6 * (1.0 + 0.5 * static_cast<double>(scale) *
                                               std::sqrt(static_cast<double>(shape.head_dim)));
    for (size_t head = 0; head < shape.query_heads; ++head) {
      const std::vector<double> want = expected(row, head);
      for (size_t i = 0; i < shape.head_dim; ++i) {
        if (!(std::abs(result[head * shape.head_dim + i] - want[i]) <= tolerance)) {
          return false;
        }
      }
    }
    return true;
  }

  std::string name(const Kernels& kernels) const {
    return std::string(kernels.name) + ", " +
           (shape.type == KVType::bfloat16 ? "bfloat16" : "float32") + ", head_dim " +
           std::to_string(shape.head_dim) + ", " + std::to_string(shape.query_heads) + " heads on " +
           std::to_string(shape.kv_heads) + ", " + std::to_string(tokens) + " tokens, " +
           std::to_string(rows) + " rows from " + std::to_string(first);
  }
};

// As decode_attention does it: the splits of one row, joined.
ExactBuffer<float> decode(const Case& c, const Kernels& kernels, size_t row) {
  const HeadShape& shape = c.shape;
  ExactBuffer<float> query(shape.query_floats());
  std::copy_n(c.queries.data() + row * shape.query_floats(), shape.query_floats(), query.data());
  ExactBuffer<float> prepared(shape.query_floats());
  kernels.prepare_queries(shape, query.data(), c.scale, prepared.data());
  const size_t tokens = c.position(row) + 1;
  const size_t seen = c.softmax.first_seen(c.position(row));
  const size_t partial = Partial::floats(shape.query_heads, shape.head_dim);
  const size_t splits = splits_of(tokens) - seen / kSplitTokens;
  ExactBuffer<float> partials(splits * partial);
  for (size_t s = 0; s < splits; ++s) {
    const size_t from = (seen / kSplitTokens + s) * kSplitTokens;
    const size_t offset = from * shape.row_bytes();
    // Some heads, then the others: together they are all.
    const HeadRun some{0, (shape.kv_heads + 1) / 2};
    for (const HeadRun& heads : {some, HeadRun{some.count, shape.kv_heads - some.count}}) {
      kernels.attend_split(
          shape, c.softmax.softcap, heads, prepared.data(), c.origin(c.keys) + offset,
          c.origin(c.values) + offset, seen > from ? seen - from : 0,
          std::min(kSplitTokens, tokens - from),
          Partial::at(partials.data() + s * partial, shape.query_heads));
    }
  }
  ExactBuffer<float> out(shape.query_floats());
  kernels.finish(shape, c.softmax.sinks, partials.data(), splits, out.data());
  return out;
}

// As chunk_attention does it: all rows of the case, kChunkRows at a time.
ExactBuffer<float> chunk(const Case& c, const Kernels& kernels) {
  const HeadShape& shape = c.shape;
  ExactBuffer<float> prepared(c.rows * shape.query_floats());
  ExactBuffer<float> out(c.rows * shape.query_floats());
  for (size_t row = 0; row < c.rows; ++row) {
    const size_t at = row * shape.query_floats();
    kernels.prepare_queries(shape, c.queries.data() + at, c.scale, prepared.data() + at);
  }
  for (size_t row = 0; row < c.rows; row += kChunkRows) {
    for (size_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
      const size_t at = row * shape.query_floats() + kv_head * shape.group() * shape.head_dim;
      ExactBuffer<float> scratch(chunk_scratch_floats(shape));
      std::fill_n(scratch.data(), scratch.size(), kNan);  // what an earlier call left there
      kernels.attend_chunk(
          shape, c.softmax, kv_head, prepared.data() + at, c.origin(c.keys), c.origin(c.values),
          std::min(kChunkRows, c.rows - row), c.position(row), out.data() + at, scratch.data());
    }
  }
  return out;
}

void check_case(const Case& c, const Kernels& kernels) {
  const ExactBuffer<float> together = chunk(c, kernels);
  for (size_t row = 0; row < c.rows; ++row) {
    const ExactBuffer<float> alone = decode(c, kernels, row);
    const float* const among = together.data() + row * c.shape.query_floats();
    CHECK_CASE(std::memcmp(alone.data(), among, alone.size() * sizeof(float)) == 0,
               c.name(kernels) + ": decode and chunk differ");
    CHECK_CASE(c.good(row, alone.data()), c.name(kernels));
  }
}

std::vector<HeadShape> shapes() {
  std::vector<HeadShape> all;
  for (KVType type : {KVType::bfloat16, KVType::float32}) {
    for (size_t head_dim : {32, 64, 128, 256}) {
      for (size_t group : {1, 2, 3, 4, 5, 7, 8}) {
        all.push_back({2 * group, 2, head_dim, type});
      }
    }
  }
  return all;
}

TEST("attention is what double precision says, for every shape and length") {
  const size_t lengths[] = {1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 255, 256, 257, 513};
  for_each_set([&](const Kernels& kernels) {
    for (const HeadShape& shape : shapes()) {
      for (size_t tokens : lengths) {
        check_case(Case(shape, tokens, 1), kernels);
      }
    }
  });
}

TEST("chunks of every number of rows, at odd positions, are right in every row") {
  for_each_set([&](const Kernels& kernels) {
    for (const HeadShape& shape : shapes()) {
      if (shape.head_dim > 64) {
        continue;
      }
      for (size_t rows = 1; rows <= 19; rows += rows < 6 ? 1 : 3) {
        check_case(Case(shape, rows, rows), kernels);       // from position 0
        check_case(Case(shape, 59 + rows, rows), kernels);  // across the border of a tile
      }
      check_case(Case(shape, 258, 5), kernels);  // and of a split
    }
  });
}

TEST("windows, softcaps and sinks are right in every row, and no key before a window is read") {
  const float sinks[] = {-4.0f, 0.5f, 3.0f, 90.0f};
  for_each_set([&](const Kernels& kernels) {
    for (KVType type : {KVType::bfloat16, KVType::float32}) {
      for (size_t head_dim : {64, 256}) {
        for (size_t window : {1, 5, 63, 64, 70, 200, 256, 300}) {
          for (size_t tokens : {64, 258, 340}) {
            const HeadShape shape{4, 2, head_dim, type};
            check_case(Case(shape, tokens, 19, 1.0f, {window}), kernels);
            check_case(Case(shape, tokens, 33, 8.0f, {window, 2.0f, sinks}), kernels);
          }
        }
      }
    }
  });
}

TEST("scores far apart are weighed right, whichever comes first") {
  for_each_set([&](const Kernels& kernels) {
    for (KVType type : {KVType::bfloat16, KVType::float32}) {
      for (float spread : {8.0f, 60.0f}) {
        check_case(Case({4, 2, 64, type}, 300, 3, spread), kernels);
      }
    }
  });
}

TEST("many heads, one head and the most heads are right") {
  for_each_set([&](const Kernels& kernels) {
    check_case(Case({1, 1, 32, KVType::bfloat16}, 70, 2), kernels);
    check_case(Case({16, 16, 32, KVType::float32}, 70, 2), kernels);
    check_case(Case({kMaxQueryHeads, 4, 32, KVType::bfloat16}, 66, 2), kernels);
  });
}

TEST("a NaN spoils its own row and those after it, and no other") {
  for_each_set([&](const Kernels& kernels) {
    for (KVType type : {KVType::bfloat16, KVType::float32}) {
      for (uint32_t bits : {0x7fc00000u, 0xffc00000u, 0x7fc10000u, 0x7f810000u, 0x7fc00001u,
                            0x7f800001u, 0xffc00155u, 0x7fffffffu}) {
        if (type == KVType::bfloat16 && bits << 16 != 0) {
          continue;
        }
        for (bool in_keys : {true, false}) {
          Case c({4, 2, 32, type}, 70, 9);
          const size_t bad = c.position(4);
          for (size_t i = 0; i < (in_keys ? 1 : c.shape.head_dim); ++i) {
            c.set(in_keys ? c.keys : c.values, bad * c.shape.row_elements() + i, float_of(bits));
          }
          const ExactBuffer<float> out = chunk(c, kernels);
          for (size_t row = 0; row < c.rows; ++row) {
            const ExactBuffer<float> alone = decode(c, kernels, row);
            for (size_t i = 0; i < c.shape.query_floats(); ++i) {
              // KV head 0 has the NaN; KV head 1's query heads are the second half.
              const bool want = row >= 4 && i < c.shape.query_floats() / 2;
              CHECK_CASE(std::isnan(out[row * c.shape.query_floats() + i]) == want,
                         c.name(kernels) + ", NaN " + std::to_string(bits));
              CHECK_CASE(std::isnan(alone[i]) == want,
                         c.name(kernels) + ", NaN " + std::to_string(bits));
            }
          }
        }
      }
    }
  });
}

TEST("a weight is e^x to 2 ulp, and 0 below the smallest normal number") {
  // Two tokens: the first has score 0 and value 0, the second score x and value 1, so that what is
  // gathered is the second one's weight itself.
  for_each_set([&](const Kernels& kernels) {
    const HeadShape shape{1, 1, 32, KVType::float32};
    ExactBuffer<float> prepared(32);
    ExactBuffer<float> keys(2 * 32);
    ExactBuffer<float> values(2 * 32);
    ExactBuffer<float> partial(Partial::floats(1, 32));
    std::fill_n(prepared.data(), 32, 0.0f);
    std::fill_n(keys.data(), 64, 0.0f);
    std::fill_n(values.data(), 32, 0.0f);
    std::fill_n(values.data() + 32, 32, 1.0f);
    prepared[0] = 1.0f;
    for (float x = 0.0f; x > -100.0f; x -= 0.00037f) {
      keys[32] = x;
      kernels.attend_split(
          shape, 0.0f, {0, 1}, prepared.data(), keys.data(), values.data(), 0, 2,
          Partial::at(partial.data(), 1));
      const float got = Partial::at(partial.data(), 1).values[7];
      const double want = std::exp(static_cast<double>(x));
      if (x >= -87.0f) {
        const double ulp = std::ldexp(1.0, std::ilogb(static_cast<float>(want)) - 23);
        CHECK_CASE(std::abs(got - want) <= 2 * ulp, std::to_string(x));
      } else {
        CHECK_CASE(got == 0.0f, std::to_string(x));
      }
    }
  });
}

TEST("rounding to bfloat16 is to nearest even, for every kind of number") {
  std::vector<uint32_t> patterns;
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (uint32_t lower : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      patterns.push_back(upper << 16 | lower);
    }
  }
  for_each_set([&](const Kernels& kernels) {
    ExactBuffer<float> source(patterns.size());
    std::memcpy(source.data(), patterns.data(), patterns.size() * sizeof(uint32_t));
    ExactBuffer<uint16_t> target(patterns.size());
    kernels.to_bfloat16(source.data(), target.data(), patterns.size());
    for (size_t i = 0; i < patterns.size(); ++i) {
      CHECK_CASE(target[i] == nearest_bfloat16(patterns[i]), std::to_string(patterns[i]));
    }
    ExactBuffer<uint16_t> halves(0x10000);
    for (size_t i = 0; i < halves.size(); ++i) {
      halves[i] = static_cast<uint16_t>(i);
    }
    ExactBuffer<float> widened(halves.size());
    kernels.from_bfloat16(halves.data(), widened.data(), halves.size());
    for (size_t i = 0; i < halves.size(); ++i) {
      CHECK(bits_of(widened[i]) == static_cast<uint32_t>(i) << 16);
    }
  });
}

TEST("conversions of any length stay inside their buffers") {
  for_each_set([&](const Kernels& kernels) {
    for (size_t count = 0; count < 70; ++count) {
      ExactBuffer<float> numbers(count);
      ExactBuffer<uint16_t> halves(count);
      for (size_t i = 0; i < count; ++i) {
        numbers[i] = static_cast<float>(i);
      }
      kernels.to_bfloat16(numbers.data(), halves.data(), count);
      kernels.from_bfloat16(halves.data(), numbers.data(), count);
      for (size_t i = 0; i < count; ++i) {
        CHECK(numbers[i] == static_cast<float>(i));
      }
    }
  });
}

TEST("instruction sets are chosen by name, and the best one first") {
  CHECK(!available().empty());
  CHECK(select("auto").name == available().front());
  for (const std::string& name : available()) {
    CHECK(select(name).name == name);
  }
  CHECK(test::throws<std::invalid_argument>("'mmx' is not to be had", [] { select("mmx"); }));
  CHECK(test::throws<std::invalid_argument>(available().back(), [] { select(""); }));
  for (size_t head_dim = 0; head_dim < 600; ++head_dim) {
    const bool built = head_dim == 32 || head_dim == 64 || head_dim == 128 || head_dim == 256;
    CHECK(supports_head_dim(head_dim) == built);
  }
}

}  // namespace
}  // namespace quire::cpu
