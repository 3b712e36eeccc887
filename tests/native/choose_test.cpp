#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/dispatch.h"
#include "cpu/filter.h"
#include "exact_buffer.h"

namespace quire::cpu {
namespace {

using test::ExactBuffer;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const std::vector<size_t> kLengths = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 1000};

void for_each_set(const std::function<void(const Kernels&)>& body) {
  for (const std::string& name : available()) {
    body(select(name));
  }
}

std::string named(const Kernels& kernels, size_t n) {
  return std::string(kernels.name) + ": " + std::to_string(n) + " numbers";
}

ExactBuffer<float> normal(size_t n, float width = 1.0f, uint32_t seed = 0) {
  std::mt19937 random(static_cast<uint32_t>(n) + seed);
  std::normal_distribution<float> some(0.0f, width);
  ExactBuffer<float> x(n);
  std::generate(x.data(), x.data() + n, [&] { return some(random); });
  return x;
}

TEST("the largest number of a row is found wherever it stands, below zero too") {
  for_each_set([](const Kernels& kernels) {
    for (size_t n : kLengths) {
      for (size_t at = 0; at < n; ++at) {
        ExactBuffer<float> x = normal(n);
        for (size_t i = 0; i < n; ++i) {
          x[i] = -10.0f - std::abs(x[i]);
        }
        x[at] = -9.0f;
        bool finite = false;
        CHECK_CASE(kernels.choose.largest(x.data(), n, &finite) == -9.0f, named(kernels, n));
        CHECK_CASE(finite, named(kernels, n));
      }
    }
  });
}

TEST("a number that is none is seen wherever it stands, and is not the largest if it is a NaN") {
  for_each_set([](const Kernels& kernels) {
    for (size_t n : kLengths) {
      for (float strange : {NAN, -NAN, kInfinity, -kInfinity}) {
        for (size_t at = 0; at < n; ++at) {
          ExactBuffer<float> x = normal(n);
          x[at] = -kInfinity;
          const float rest = *std::max_element(x.data(), x.data() + n);
          x[at] = strange;
          bool finite = true;
          const float found = kernels.choose.largest(x.data(), n, &finite);
          CHECK_CASE(found == (strange > 0 ? strange : rest), named(kernels, n));
          CHECK_CASE(!finite, named(kernels, n));
        }
      }
    }
  });
}

TEST("weights are exponentials, to 3e-7 of the exponent's size, and their sum is theirs") {
  for_each_set([](const Kernels& kernels) {
    for (size_t n : kLengths) {
      for (float scale : {0.01f, 1.0f, 5.0f}) {
        ExactBuffer<float> x = normal(n, 4.0f);
        x[n / 2] = n > 1 ? -kInfinity : x[0];
        const float highest = *std::max_element(x.data(), x.data() + n);
        ExactBuffer<float> weights(n);
        const double sum = kernels.choose.weigh(x.data(), highest, scale, n, weights.data());
        double expected = 0;
        for (size_t i = 0; i < n; ++i) {
          const double exponent = (static_cast<double>(x[i]) - highest) * scale;
          const double exact = std::exp(exponent);
          const bool gone = exponent < -87.0 && weights[i] == 0.0f;
          CHECK_CASE(gone || std::abs(weights[i] - exact) <= 3e-7 * (1 - exponent) * exact,
                     named(kernels, n));
          CHECK_CASE(x[i] != highest || weights[i] == 1.0f, named(kernels, n));
          expected += weights[i];
        }
        CHECK_CASE(std::abs(sum - expected) <= 1e-14 * expected, named(kernels, n));
      }
    }
  });
}

TEST("what is not a number weighs nothing, nor does what is masked, at any temperature") {
  for_each_set([](const Kernels& kernels) {
    for (float scale : {1e-38f, 1.0f, std::numeric_limits<float>::max()}) {
      for (size_t n : kLengths) {
        for (float strange : {NAN, -kInfinity}) {
          ExactBuffer<float> x(n);
          std::fill(x.data(), x.data() + n, 2.5f);
          x[n - 1] = strange;
          ExactBuffer<float> weights(n);
          const double sum = kernels.choose.weigh(x.data(), 2.5f, scale, n, weights.data());
          CHECK_CASE(sum == static_cast<double>(n - 1), named(kernels, n));
          CHECK_CASE(weights[n - 1] == 0.0f, named(kernels, n));
        }
      }
    }
  });
}

TEST("weights from a floor on are collected in order, the floor's own among them") {
  for_each_set([](const Kernels& kernels) {
    for (size_t n : kLengths) {
      ExactBuffer<float> weights = normal(n);
      for (size_t i = 0; i < n; ++i) {
        weights[i] = std::min(1.0f, std::abs(weights[i]));
      }
      for (float floor : {0.0f, weights[n / 2], 0.99f, 1.0f, 2.0f}) {
        std::vector<float> expected;
        std::copy_if(weights.data(), weights.data() + n, std::back_inserter(expected),
                     [&](float weight) { return weight >= floor; });
        ExactBuffer<float> found(n);
        const size_t count = kernels.choose.collect(weights.data(), floor, n, found.data());
        CHECK_CASE(std::equal(expected.begin(), expected.end(), found.data(), found.data() + count),
                   named(kernels, n));
      }
    }
  });
}

// --- noise ---------------------------------------------------------------------------------------

// The noise of numbers of 32 bits from this one on, which are one float (engine/step/sampler.py).
double gumbel(float number) {
  const double v = std::clamp(std::abs(number), 0.5f, 0x1p31f) * 0x1p-32;
  return -std::log(-(std::signbit(number) ? std::log(v) : std::log1p(-v)));
}

TEST("of many tokens the one leads that scores most alone, with the same bits on every set") {
  ExactBuffer<float> noise(2 * kNoiseNumbers);
  for (uint32_t i = 0; i < kNoiseNumbers; ++i) {
    const double value = gumbel(std::bit_cast<float>(i << 16));
    const double next = gumbel(std::bit_cast<float>((i + 1) << 16));
    noise[i] = static_cast<float>(value);
    noise[kNoiseNumbers + i] = static_cast<float>((next - value) * 0x1p-16);
  }
  for (uint32_t n : {1, 2, 15, 16, 17, 33, 1000, 20000}) {
    const ExactBuffer<float> x = normal(n);
    ExactBuffer<float> weights(n);
    for (uint32_t k = 0; k < 20; ++k) {
      const Scoring scoring{*std::max_element(x.data(), x.data() + n), 0.2f * static_cast<float>(k),
                            k % 2 == 0 ? 0.0f : 0.5f, {k * 0x9e3779b9u, ~k}, noise.data()};
      select(available().back()).choose.weigh(x.data(), scoring.highest, scoring.scale, n, weights.data());
      Leader first{0.0f, 0};
      for_each_set([&](const Kernels& kernels) {
        const auto lead = [&](uint32_t at, size_t count) {
          return kernels.choose.lead(scoring, x.data() + at, weights.data() + at, count, n + at);
        };
        Leader best = lead(0, 1);
        for (uint32_t i = 1; i < n; ++i) {
          best = std::max(best, lead(i, 1), [](const Leader& a, const Leader& b) {
            return a.score < b.score;
          });
        }
        first = first.token == 0 ? best : first;
        CHECK_CASE(best.score == first.score && best.token == first.token, named(kernels, n));
        const Leader all = lead(0, n);
        CHECK_CASE(all.score == best.score && all.token == best.token, named(kernels, n));
      });
    }
  }
}

// --- top_k and top_p -----------------------------------------------------------------------------

// The same by sorting.
float sorted_floor(std::vector<float> falling, const Filter& filter) {
  std::sort(falling.begin(), falling.end(), std::greater<float>());
  falling.resize(std::min(filter.top_k, falling.size()));
  double total = 0;
  for (float weight : falling) {
    total += weight;
  }
  float floor = falling.front();
  double passed = 0;
  for (float weight : falling) {
    if (filter.top_p < 1.0 && passed > 0 && passed >= filter.top_p * total) {
      break;
    }
    floor = weight;
    passed += weight;
  }
  return floor;
}

void check_filter(const std::vector<float>& weights, const Filter& filter) {
  const size_t n = weights.size();
  ExactBuffer<float> exact(n);
  ExactBuffer<float> scratch(n);
  std::copy(weights.begin(), weights.end(), exact.data());
  double total = 0;
  for (float weight : weights) {
    total += weight;
  }
  const float expected = sorted_floor(weights, filter);
  for_each_set([&](const Kernels& kernels) {
    const float floor =
        filter_floor(kernels.choose, filter, exact.data(), n, total, scratch.data());
    for (float weight : weights) {  // zeros may stay: they count for nothing
      CHECK_CASE((weight >= floor) == (weight >= expected) || weight == 0.0f,
                 named(kernels, n) + ", top_k " + std::to_string(filter.top_k) + ", top_p " +
                     std::to_string(filter.top_p));
    }
  });
}

// Sums of such weights are exact, so that the order of summation cannot move a floor.
std::vector<float> dyadic(size_t n, uint32_t values, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> weights(n);
  for (float& weight : weights) {
    weight = static_cast<float>(random() % values) / 4096.0f;
  }
  weights[random() % n] = 1.0f;
  return weights;
}

TEST("the floor of top_k and top_p is the one that sorting gives, with ties and without") {
  for (size_t n : {1, 2, 15, 16, 17, 255, 256, 257, 1000, 5000}) {
    for (uint32_t values : {1, 2, 40, 4096}) {
      const std::vector<float> weights = dyadic(n, values, static_cast<uint32_t>(n) + values);
      for (size_t top_k : {size_t{1}, size_t{2}, size_t{10}, size_t{40}, n / 2, n - 1, n}) {
        for (double top_p : {1e-6, 0.25, 0.5, 0.875, 0.99, 1.0}) {
          check_filter(weights, {std::max<size_t>(top_k, 1), top_p});
        }
      }
    }
  }
}

TEST("weights that are all alike, or that differ in their last bit only, are told apart") {
  std::vector<float> weights(3000, 1.0f);
  check_filter(weights, {7, 0.5});
  check_filter(weights, {weights.size(), 0.01});
  float weight = 1.0f;
  for (float& each : weights) {
    each = weight;
    weight = std::nextafter(weight, 0.0f);
  }
  for (size_t top_k : {size_t{1}, size_t{2}, size_t{1023}, size_t{2999}, weights.size()}) {
    check_filter(weights, {top_k, 1.0});
    check_filter(weights, {top_k, 0.5});
  }
}

TEST("a token far ahead of all others is all that a nucleus has, however many these are") {
  std::vector<float> weights(4000, 1e-6f);
  weights[1234] = 1.0f;
  check_filter(weights, {weights.size(), 0.99});
  check_filter(weights, {weights.size(), 0.9999});
  std::fill(weights.begin(), weights.end(), 0.0f);
  weights[3999] = 1.0f;
  check_filter(weights, {weights.size(), 0.5});
  check_filter(weights, {20, 0.5});
}

}  // namespace
}  // namespace quire::cpu
