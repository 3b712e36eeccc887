#include "cpu/linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/dispatch.h"
#include "cpu/packing.h"
#include "exact_buffer.h"

namespace quire::cpu {
namespace {

using test::ExactBuffer;

// Of the sum of the products' magnitudes: what rounding may cost at most, with two bfloat16 parts of
// x, with whole numbers of 24 bits or with float32 all along.
constexpr double kTolerance = 1e-5;
// Of a group's largest magnitude, at each of the group's codes: what cutting x into whole numbers
// may cost (2^-24), and as much again twice for sums in float32.
constexpr double kLargestTolerance = 3.0 / (1 << 24);

// What a product of bfloat16 weights may lose of itself where x may be rounded to bfloat16.
constexpr double kPairTolerance = 1.0 / (1 << 8);

// Of a group's largest magnitude: what cutting x into whole numbers of 16 or 8 bits may cost.
double digit_tolerance(const LinearShape& shape) {
  switch (shape.activations) {
    case Activations::bfloat16: return 0.5 / 32638 * 1.01;
    case Activations::int8: return 0.5 / 127 * 1.01;
    default: return 0;
  }
}

uint16_t bfloat16_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

std::string described(const LinearShape& s, size_t rows) {
  return std::to_string(s.outputs) + " x " + std::to_string(s.inputs) + ", " +
         std::to_string(s.bits()) + " bits, group " + std::to_string(s.group) + ", activations " +
         std::to_string(static_cast<int>(s.activations)) + ", " +
         std::to_string(rows) + " rows";
}

// A layer with its weights as MLX has them, packed, and as doubles; and rows of x.
struct Case {
  LinearShape shape;
  size_t rows;
  std::vector<double> weights;  // [outputs][inputs]
  std::vector<double> scaled_codes;  // the same without their biases
  ExactBuffer<std::byte> packed;
  ExactBuffer<float> x;

  Case(LinearShape s, size_t rows)
      : shape(s), rows(rows), packed(s.packed_bytes()), x(rows * s.inputs) {
    std::mt19937 random(static_cast<uint32_t>(s.outputs * 7919 + s.inputs * 31 + rows));
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = normal(random);
    }
    if (s.type == WeightType::e2m1) {
      make_floats(random);
    } else if (s.quantized()) {
      make_codes(random, normal);
    } else {
      make_numbers(random, normal);
    }
  }

  template <class Random, class Normal>
  void make_numbers(Random& random, Normal& normal) {
    std::vector<float> numbers(shape.outputs * shape.inputs);
    std::vector<uint16_t> halves;
    for (float& number : numbers) {
      number = normal(random);
      halves.push_back(bfloat16_of(number));
      const uint32_t widened = static_cast<uint32_t>(halves.back()) << 16;
      if (shape.type == WeightType::bfloat16) {
        std::memcpy(&number, &widened, sizeof(number));
      }
    }
    weights.assign(numbers.begin(), numbers.end());
    const bool narrow = shape.type == WeightType::bfloat16;
    pack_all({{shape.outputs, narrow ? StoredNumber::bfloat16 : StoredNumber::float32},
              narrow ? static_cast<const void*>(halves.data()) : numbers.data()});
  }

  template <class Random, class Normal>
  void make_codes(Random& random, Normal& normal) {
    const size_t groups = shape.outputs * shape.groups();
    std::vector<uint32_t> codes(shape.outputs * shape.inputs * shape.bits() / 32);
    std::generate(codes.begin(), codes.end(), [&] { return static_cast<uint32_t>(random()); });
    std::vector<uint16_t> narrow[2];
    std::vector<float> wide[2];
    for (size_t i = 0; i < groups; ++i) {
      for (size_t which : {0, 1}) {
        const float number = normal(random) * (which == 0 ? 0.02f : 0.3f);
        const uint32_t widened = static_cast<uint32_t>(bfloat16_of(number)) << 16;
        float rounded;
        std::memcpy(&rounded, &widened, sizeof(rounded));
        narrow[which].push_back(bfloat16_of(number));
        wide[which].push_back(shape.scales == ScaleType::bfloat16 ? rounded : number);
      }
    }
    const size_t in_a_word = 32 / shape.bits();
    for (size_t i = 0; i < shape.outputs * shape.inputs; ++i) {
      const uint32_t code = codes[i / in_a_word] >> i % in_a_word * shape.bits();
      const auto mask = (uint32_t{1} << shape.bits()) - 1;
      scaled_codes.push_back(static_cast<double>(code & mask) * wide[0][i / shape.group]);
      weights.push_back(scaled_codes.back() + wide[1][i / shape.group]);
    }
    StoredKind kind{shape.outputs, StoredNumber::float32, shape.bits(), shape.group};
    if (shape.scales == ScaleType::bfloat16) {
      kind.numbers = StoredNumber::bfloat16;
      pack_all({kind, codes.data(), narrow[0].data(), narrow[1].data()});
    } else {
      pack_all({kind, codes.data(), wide[0].data(), wide[1].data()});
    }
  }

  template <class Random>
  void make_floats(Random& random) {
    std::vector<uint8_t> codes(shape.outputs * shape.inputs / 2);
    std::vector<uint8_t> exponents(shape.outputs * shape.groups());
    std::generate(codes.begin(), codes.end(), [&] { return static_cast<uint8_t>(random()); });
    std::generate(exponents.begin(), exponents.end(),
                  [&] { return static_cast<uint8_t>(118 + random() % 8); });
    constexpr double kSizes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    for (size_t i = 0; i < shape.outputs * shape.inputs; ++i) {
      const int code = codes[i / 2] >> i % 2 * 4;
      const double scale = std::ldexp(1, exponents[i / shape.group] - 127);
      weights.push_back((code & 8 ? -scale : scale) * kSizes[code & 7]);
      scaled_codes.push_back(weights.back() + 6 * scale);
    }
    pack_all({{shape.outputs, StoredNumber::exponents, shape.bits(), shape.group}, codes.data(),
              exponents.data()});
  }

  void pack_all(const Weights& from) {
    LinearShape stored = joined_shape(shape.inputs, {&from.kind, 1});
    stored.activations = shape.activations;
    CHECK(stored == shape);
    for (size_t p = 0; p < shape.panels(); ++p) {
      pack(shape, {&from, 1}, p, 1, packed.data());
    }
  }

  // All rows at once, panels in two calls.
  std::vector<float> multiplied(const Kernels& kernels, size_t first_row, size_t count) const {
    const LinearKernels& linear = kernels.linear;
    const float* from = x.data() + first_row * shape.inputs;
    ExactBuffer<std::byte> prepared(linear.prepared_bytes(shape, count));
    std::memset(prepared.data(), 0x5a, prepared.size());  // as memory that was used before
    for (size_t r = 0; r < count; ++r) {
      linear.prepare(shape, from + r * shape.inputs, r, prepared.data());
    }
    ExactBuffer<float> out(count * shape.outputs);
    const size_t half = shape.panels() / 2;
    for (const auto& [first, panels] : {std::pair{size_t{0}, half}, {half, shape.panels() - half}}) {
      if (panels != 0) {
        linear.multiply(shape, packed.data(), prepared.data(), count, first, panels, out.data(),
                        shape.outputs);
      }
    }
    return {out.data(), out.data() + out.size()};
  }

  // A row has the same bits as among all, which are `together`.
  void check_alone(
      const Kernels& kernels, size_t row, const std::vector<float>& together) const {
    const std::vector<float> alone = multiplied(kernels, row, 1);
    CHECK_CASE(std::memcmp(alone.data(), together.data() + row * shape.outputs,
                           alone.size() * sizeof(float)) == 0,
               std::string(kernels.name) + ": row " + std::to_string(row) + " of " +
                   described(shape, rows));
  }

  // What cutting a row's inputs into whole numbers may cost of each, times its code.
  std::vector<double> lost_by_cutting(size_t row) const {
    const float* const its = x.data() + row * shape.inputs;
    std::vector<double> lost;
    for (size_t from = 0; from < shape.inputs; from += shape.group) {
      double largest = 0;
      for (size_t i = from; i < from + shape.group; ++i) {
        largest = std::max(largest, std::abs(static_cast<double>(its[i])));
      }
      lost.insert(lost.end(), shape.group, digit_tolerance(shape) * largest);
    }
    return lost;
  }

  void check(const Kernels& kernels) const {
    const std::vector<float> got = multiplied(kernels, 0, rows);
    const bool rounds = shape.activations != Activations::float32;
    for (size_t r = 0; r < rows; ++r) {
      const bool cuts = rounds && shape.quantized();
      const std::vector<double> lost = cuts ? lost_by_cutting(r) : std::vector<double>();
      for (size_t n = 0; n < shape.outputs; ++n) {
        double sum = 0;
        double size = 0;
        double rounded = 0;
        for (size_t i = 0; i < shape.inputs; ++i) {
          const double product = weights[n * shape.inputs + i] * x[r * shape.inputs + i];
          sum += product;
          size += std::abs(product);
          if (cuts) {
            rounded += lost[i] * std::abs(scaled_codes[n * shape.inputs + i]);
          } else if (rounds) {
            rounded += kPairTolerance * std::abs(product);
          }
        }
        CHECK_CASE(std::abs(got[r * shape.outputs + n] - sum) <= kTolerance * size + rounded,
                   std::string(kernels.name) + ": " + described(shape, rows));
      }
    }
  }
};

void for_each_set(const std::function<void(const Kernels&)>& body) {
  for (const std::string& name : available()) {
    body(select(name));
  }
}

const std::vector<LinearShape> kTypes = {
    {0, 0, WeightType::bfloat16},
    {0, 0, WeightType::float32},
    {0, 0, WeightType::bits4, 32, ScaleType::bfloat16},
    {0, 0, WeightType::bits4, 64, ScaleType::float32},
    {0, 0, WeightType::bits4, 128, ScaleType::bfloat16},
    {0, 0, WeightType::bits8, 64, ScaleType::bfloat16},
    {0, 0, WeightType::bits8, 32, ScaleType::float32},
    {0, 0, WeightType::e2m1, 32, ScaleType::bfloat16},
    {0, 0, WeightType::bfloat16, 0, ScaleType::float32, Activations::bfloat16},
    {0, 0, WeightType::bits4, 32, ScaleType::bfloat16, Activations::int8},
    {0, 0, WeightType::bits4, 64, ScaleType::float32, Activations::bfloat16},
    {0, 0, WeightType::bits4, 128, ScaleType::bfloat16, Activations::int8},
    {0, 0, WeightType::bits8, 64, ScaleType::bfloat16, Activations::bfloat16},
    {0, 0, WeightType::bits8, 32, ScaleType::float32, Activations::int8},
};

LinearShape sized(LinearShape type, size_t outputs, size_t inputs) {
  type.outputs = outputs;
  type.inputs = type.quantized() ? rounded_up(inputs, type.group) : inputs;
  return type;
}

TEST("products are those of doubles, whatever the shape and however the weights are stored") {
  for_each_set([](const Kernels& kernels) {
    for (const LinearShape& type : kTypes) {
      for (size_t outputs : {1, 15, 16, 33, 100}) {
        for (size_t inputs : {1, 2, 33, 64, 129, 256}) {
          for (size_t rows : {1, 3, 17}) {
            Case(sized(type, outputs, inputs), rows).check(kernels);
          }
        }
      }
    }
  });
}

TEST("products are right for every number of rows around a tile's") {
  for_each_set([](const Kernels& kernels) {
    for (const LinearShape& type : kTypes) {
      for (size_t rows : {2, 4, 5, 8, 9, 15, 16, 31, 32, 33, 47, 48, 49, 64, 255, 256}) {
        Case(sized(type, 48, 96), rows).check(kernels);
      }
    }
  });
}

TEST("products are right for more inputs than a core's cache has room for") {
  for_each_set([](const Kernels& kernels) {
    for (const LinearShape& type : kTypes) {
      for (size_t rows : {1, 4, 16, 20}) {
        Case(sized(type, 40, 2176), rows).check(kernels);
      }
    }
  });
}

TEST("products are right, and each row's bits its own, for every number of rows up to 20") {
  for_each_set([](const Kernels& kernels) {
    for (const LinearShape& type : kTypes) {
      for (size_t inputs : {128, 129}) {
        for (size_t rows = 1; rows <= 20; ++rows) {
          const Case all(sized(type, 72, inputs), rows);
          all.check(kernels);
          const std::vector<float> together = all.multiplied(kernels, 0, rows);
          for (size_t r = 0; r < rows; ++r) {
            all.check_alone(kernels, r, together);
          }
        }
      }
    }
  });
}

TEST("a row's product has the same bits alone and among others") {
  for_each_set([](const Kernels& kernels) {
    for (const LinearShape& type : kTypes) {
      const Case both(sized(type, 100, 160), 70);
      const std::vector<float> together = both.multiplied(kernels, 0, both.rows);
      for (size_t r : {0, 1, 15, 16, 31, 32, 63, 64, 69}) {
        both.check_alone(kernels, r, together);
      }
    }
  });
}

TEST("what is not finite in a row stays in that row") {
  for_each_set([](const Kernels& kernels) {
    for (const LinearShape& type : kTypes) {
      Case one(sized(type, 40, 64), 20);
      one.x[5 * one.shape.inputs + 7] = INFINITY;
      one.x[9 * one.shape.inputs] = NAN;
      const std::vector<float> got = one.multiplied(kernels, 0, one.rows);
      for (size_t r = 0; r < one.rows; ++r) {
        const bool finite = std::isfinite(got[r * one.shape.outputs]);
        CHECK_CASE(finite == (r != 5 && r != 9), described(one.shape, r));
      }
    }
  });
}

const std::vector<LinearShape> kCodeTypes = [] {
  std::vector<LinearShape> types;
  std::copy_if(kTypes.begin(), kTypes.end(), std::back_inserter(types),
               [](const LinearShape& type) { return type.quantized(); });
  return types;
}();

TEST("an input far larger than its group costs the others no more than it has to") {
  constexpr size_t kRows = 6;
  constexpr size_t kOutlier = 37;
  for_each_set([](const Kernels& kernels) {
    for (const LinearShape& type : kCodeTypes) {
      Case one(sized(type, 40, 256), kRows);
      const size_t inputs = one.shape.inputs;
      const size_t group = kOutlier / one.shape.group;
      for (size_t r = 0; r < kRows; ++r) {
        one.x[r * inputs + kOutlier] = r % 2 == 0 ? 1e4f : -1e4f;
      }
      const std::vector<float> got = one.multiplied(kernels, 0, kRows);
      for (size_t r = 0; r < kRows; ++r) {
        for (size_t n = 0; n < one.shape.outputs; ++n) {
          double sum = 0;
          double size_of_others = 0;
          double beside = 0;  // the outlier
          for (size_t i = 0; i < inputs; ++i) {
            const double weight = one.weights[n * inputs + i];
            sum += weight * one.x[r * inputs + i];
            size_of_others += i == kOutlier ? 0 : std::abs(weight * one.x[r * inputs + i]);
            beside += i / one.shape.group == group
                          ? std::abs(weight) + std::abs(one.scaled_codes[n * inputs + i])
                          : 0;
          }
          CHECK_CASE(std::abs(got[r * one.shape.outputs + n] - sum) <=
                         kTolerance * size_of_others +
                             (kLargestTolerance + digit_tolerance(type)) * 1e4 * beside,
                     std::string(kernels.name) + ": " + described(one.shape, r));
        }
      }
    }
  });
}

TEST("a row of zeros gives zeros, and zeros in a row cost nothing") {
  for_each_set([](const Kernels& kernels) {
    for (const LinearShape& type : kTypes) {
      for (size_t rows : {2, 7}) {
        Case one(sized(type, 40, 256), rows);
        const size_t inputs = one.shape.inputs;
        std::fill_n(one.x.data() + inputs, inputs, 0.0f);
        std::fill_n(one.x.data(), 128, 0.0f);  // of row 0 whole groups
        one.check(kernels);
        const std::vector<float> got = one.multiplied(kernels, 0, rows);
        for (size_t n = 0; n < one.shape.outputs; ++n) {
          CHECK_CASE(got[one.shape.outputs + n] == 0.0f, described(one.shape, rows));
        }
      }
    }
  });
}

TEST("products of codes are right for the smallest and the largest numbers") {
  for_each_set([](const Kernels& kernels) {
    for (const LinearShape& type : kCodeTypes) {
      // Beyond the last one, a group's sum of x times codes may be more than float32 holds.
      for (float size : {1e-37f, 1e-30f, 1e30f, 1e33f}) {
        for (size_t rows : {1, 2, 3, 9}) {
          Case one(sized(type, 40, 256), rows);
          for (size_t i = 0; i < one.x.size(); ++i) {
            one.x[i] *= size;
          }
          one.check(kernels);
        }
      }
    }
  });
}

// A matrix of ones' scales and biases -bits, and what its numbers are.
struct StoredCodes {
  Weights weights;
  ExactBuffer<uint8_t> codes;
  ExactBuffer<uint16_t> scales;
  ExactBuffer<uint16_t> biases;
  std::vector<float> numbers;

  StoredCodes(size_t outputs, size_t inputs, size_t bits, size_t group)
      : weights{{outputs, StoredNumber::bfloat16, bits, group}, nullptr},
        codes(outputs * inputs * bits / 8),
        scales(outputs * inputs / group),
        biases(outputs * inputs / group) {
    std::mt19937 random(static_cast<uint32_t>(bits));
    std::generate_n(codes.data(), codes.size(), [&] { return static_cast<uint8_t>(random()); });
    std::fill_n(scales.data(), scales.size(), bfloat16_of(1));
    std::fill_n(biases.data(), biases.size(), bfloat16_of(-static_cast<float>(bits)));
    weights.numbers = codes.data();
    weights.scales = scales.data();
    weights.biases = biases.data();
    for (size_t i = 0; i < outputs * inputs; ++i) {
      float number = -static_cast<float>(bits);
      for (size_t bit = 0; bit < bits; ++bit) {
        const size_t at = i * bits + bit;
        number += static_cast<float>((codes[at / 8] >> at % 8 & 1) << bit);
      }
      numbers.push_back(number);
    }
  }
};

TEST("parts of any bits and groups become one layer, and every number stays") {
  constexpr size_t kInputs = 128;
  constexpr size_t kOutputs = 13;
  for (size_t bits : {1, 2, 3, 4, 5, 6, 8}) {
    for (size_t other : {1, 3, 4, 5, 8}) {
      const StoredCodes both[] = {{kOutputs, kInputs, bits, 64}, {kOutputs, kInputs, other, 32}};
      const Weights parts[] = {both[0].weights, both[1].weights};
      const StoredKind kinds[] = {parts[0].kind, parts[1].kind};
      const LinearShape shape = joined_shape(kInputs, kinds);
      CHECK(shape.type == (std::max(bits, other) <= 4 ? WeightType::bits4 : WeightType::bits8));
      CHECK(shape.group == 32 && shape.scales == ScaleType::bfloat16);
      ExactBuffer<std::byte> packed(shape.packed_bytes());
      for (size_t panel = 0; panel < shape.panels(); ++panel) {
        pack(shape, parts, panel, 1, packed.data());
      }
      ExactBuffer<float> row(kInputs);
      for (size_t n = 0; n < 2 * kOutputs; ++n) {
        unpack(shape, packed.data(), n, row.data());
        CHECK(std::equal(row.data(), row.data() + kInputs,
                         both[n / kOutputs].numbers.data() + n % kOutputs * kInputs));
      }
    }
  }
}

TEST("a packed layer gives its weights back") {
  for (const LinearShape& type : kTypes) {
    const Case one(sized(type, 37, 96), 1);
    ExactBuffer<float> row(one.shape.inputs);
    for (size_t n = 0; n < one.shape.outputs; ++n) {
      unpack(one.shape, one.packed.data(), n, row.data());
      for (size_t i = 0; i < one.shape.inputs; ++i) {
        const double weight = one.weights[n * one.shape.inputs + i];
        CHECK_CASE(std::abs(row[i] - weight) <= 1e-6 * (1 + std::abs(weight)),
                   described(one.shape, n));
      }
    }
  }
}

}  // namespace
}  // namespace quire::cpu
