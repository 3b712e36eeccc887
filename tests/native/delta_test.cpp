#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/dispatch.h"
#include "cpu/kernels.h"
#include "exact_buffer.h"

namespace quire::cpu {
namespace {

using test::ExactBuffer;

ExactBuffer<float> numbers(size_t count, uint32_t seed) {
  ExactBuffer<float> made(count);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < count; ++i) {
    made[i] = normal(random);
  }
  return made;
}

bool near(double got, double want, double tolerance) {
  return std::abs(got - want) <= tolerance * (1.0 + std::abs(want));
}

void for_each_set(const std::function<void(const Kernels&)>& body) {
  for (const std::string& name : available()) {
    body(select(name));
  }
}

TEST("a convolution is that of doubles, and a missing row is zeros") {
  for_each_set([](const Kernels& kernels) {
    for (size_t n : {1, 7, 16, 33, 128}) {
      constexpr size_t kTaps = 4;
      const ExactBuffer<float> x = numbers(kTaps * n, 1);
      const ExactBuffer<float> weights = numbers(kTaps * n, 2);
      ExactBuffer<float> out(n);
      for (size_t missing = 0; missing < kTaps; ++missing) {
        const float* rows[kTaps];
        for (size_t tap = 0; tap < kTaps; ++tap) {
          rows[tap] = tap < missing ? nullptr : x.data() + tap * n;
        }
        kernels.delta.convolve(rows, weights.data(), kTaps, n, n, out.data());
        for (size_t i = 0; i < n; ++i) {
          double sum = 0.0;
          for (size_t tap = missing; tap < kTaps; ++tap) {
            sum += static_cast<double>(x[tap * n + i]) * weights[tap * n + i];
          }
          CHECK_CASE(near(out[i], sum / (1.0 + std::exp(-sum)), 2e-6), std::string(kernels.name));
        }
      }
    }
  });
}

TEST("a vector becomes one of that length, in place as well") {
  for_each_set([](const Kernels& kernels) {
    for (size_t n : {1, 7, 16, 33, 128, 256}) {
      ExactBuffer<float> x = numbers(n, 3);
      ExactBuffer<float> out(n);
      kernels.delta.normalize(x.data(), 1e-6f, 0.25f, n, out.data());
      double squares = 1e-6;
      for (size_t i = 0; i < n; ++i) {
        squares += static_cast<double>(x[i]) * x[i];
      }
      for (size_t i = 0; i < n; ++i) {
        CHECK_CASE(near(out[i], 0.25 * x[i] / std::sqrt(squares), 1e-6), std::string(kernels.name));
      }
      kernels.delta.normalize(x.data(), 1e-6f, 0.25f, n, x.data());
      CHECK_CASE(std::memcmp(x.data(), out.data(), n * sizeof(float)) == 0,
                 std::string(kernels.name));
    }
  });
}

// A value head's tokens, and its state before them.
struct Tokens {
  static constexpr size_t kCount = 6;

  DeltaHead head;
  size_t stride;
  ExactBuffer<float> inputs;  // of each token: queries, keys, values
  ExactBuffer<float> decays;
  ExactBuffer<float> betas;
  ExactBuffer<float> before;

  explicit Tokens(DeltaHead its)
      : head(its),
        stride(2 * its.key_dim + its.value_dim),
        inputs(numbers(kCount * stride, 4)),
        decays(kCount),
        betas(kCount),
        before(numbers(its.key_dim * its.value_dim, 5)) {
    for (size_t t = 0; t < kCount; ++t) {
      decays[t] = 0.4f + 0.1f * static_cast<float>(t);
      betas[t] = 0.9f - 0.1f * static_cast<float>(t);
      for (size_t i = 0; i < 2 * head.key_dim; ++i) {
        inputs[t * stride + i] /= std::sqrt(static_cast<float>(head.key_dim));
      }
    }
  }

  void run(const Kernels& kernels, size_t first, size_t count, const float* from, float* to,
           float* out) const {
    const float* const at = inputs.data() + first * stride;
    kernels.delta.recur(
        head, {count, from, to, at, at + head.key_dim, at + 2 * head.key_dim, stride,
               decays.data() + first, betas.data() + first, out + first * head.value_dim,
               head.value_dim});
  }

  // Row `row` of the state after all tokens, and the row's outputs.
  std::vector<double> expected(size_t row, bool from_zeros, std::vector<double>& out) const {
    std::vector<double> state(head.key_dim);
    for (size_t i = 0; i < head.key_dim; ++i) {
      state[i] = from_zeros ? 0.0 : before[row * head.key_dim + i];
    }
    for (size_t t = 0; t < kCount; ++t) {
      const float* const query = inputs.data() + t * stride;
      const float* const key = query + head.key_dim;
      double recalled = 0.0;
      for (size_t i = 0; i < head.key_dim; ++i) {
        state[i] *= decays[t];
        recalled += state[i] * key[i];
      }
      const double change = (key[head.key_dim + row] - recalled) * betas[t];
      double sum = 0.0;
      for (size_t i = 0; i < head.key_dim; ++i) {
        state[i] += change * key[i];
        sum += state[i] * query[i];
      }
      out.push_back(sum);
    }
    return state;
  }
};

TEST("a recurrence is that of doubles, from a state and from zeros") {
  for_each_set([](const Kernels& kernels) {
    for (const DeltaHead head : {DeltaHead{16, 16}, DeltaHead{128, 128}, DeltaHead{208, 32}}) {
      const Tokens tokens(head);
      for (bool from_zeros : {false, true}) {
        ExactBuffer<float> after = numbers(head.key_dim * head.value_dim, 6);
        ExactBuffer<float> out(Tokens::kCount * head.value_dim);
        tokens.run(kernels, 0, Tokens::kCount, from_zeros ? nullptr : tokens.before.data(),
                   after.data(), out.data());
        for (size_t row = 0; row < head.value_dim; ++row) {
          std::vector<double> sums;
          const std::vector<double> state = tokens.expected(row, from_zeros, sums);
          for (size_t i = 0; i < head.key_dim; ++i) {
            CHECK_CASE(near(after[row * head.key_dim + i], state[i], 1e-5),
                       std::string(kernels.name));
          }
          for (size_t t = 0; t < Tokens::kCount; ++t) {
            CHECK_CASE(near(out[t * head.value_dim + row], sums[t], 1e-5),
                       std::string(kernels.name));
          }
        }
      }
    }
  });
}

TEST("a recurrence in several runs, in place or elsewhere, has the bits of one") {
  for_each_set([](const Kernels& kernels) {
    const DeltaHead head{64, 32};
    const Tokens tokens(head);
    const size_t state = head.key_dim * head.value_dim;
    const size_t outputs = Tokens::kCount * head.value_dim;
    ExactBuffer<float> want(state);
    ExactBuffer<float> wanted(outputs);
    tokens.run(kernels, 0, Tokens::kCount, tokens.before.data(), want.data(), wanted.data());
    for (size_t cut = 1; cut < Tokens::kCount; ++cut) {
      ExactBuffer<float> on_the_way(state);
      ExactBuffer<float> out(outputs);
      tokens.run(kernels, 0, cut, tokens.before.data(), on_the_way.data(), out.data());
      tokens.run(kernels, cut, Tokens::kCount - cut, on_the_way.data(), on_the_way.data(),
                 out.data());
      CHECK_CASE(std::memcmp(on_the_way.data(), want.data(), state * sizeof(float)) == 0,
                 std::string(kernels.name));
      CHECK_CASE(std::memcmp(out.data(), wanted.data(), outputs * sizeof(float)) == 0,
                 std::string(kernels.name));
    }
  });
}

}  // namespace
}  // namespace quire::cpu
