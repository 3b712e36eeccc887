#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>

#include "check.h"
#include "cpu/dispatch.h"
#include "cpu/kernels.h"
#include "exact_buffer.h"

namespace quire::cpu {
namespace {

using test::ExactBuffer;

ExactBuffer<float> numbers(size_t count, uint32_t seed, float scale = 1.0f) {
  ExactBuffer<float> made(count);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < count; ++i) {
    made[i] = normal(random) * scale;
  }
  return made;
}

// Every instruction set, and lengths around those of its vectors.
void for_each_length(const std::function<void(const Kernels&, size_t)>& body) {
  for (const std::string& name : available()) {
    for (size_t n : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 100, 128, 1000}) {
      body(select(name), n);
    }
  }
}

bool near(double got, double want, double tolerance) {
  return std::abs(got - want) <= tolerance * (1.0 + std::abs(want));
}

TEST("an RMS norm is that of doubles") {
  for_each_length([](const Kernels& kernels, size_t n) {
    const ExactBuffer<float> x = numbers(n, 1, 3.0f);
    const ExactBuffer<float> weight = numbers(n, 2);
    ExactBuffer<float> out(n);
    kernels.layer.rms_norm(x.data(), weight.data(), 1e-6f, n, out.data());
    double squares = 0;
    for (size_t i = 0; i < n; ++i) {
      squares += static_cast<double>(x[i]) * x[i];
    }
    const double root = std::sqrt(squares / static_cast<double>(n) + 1e-6);
    for (size_t i = 0; i < n; ++i) {
      CHECK_CASE(near(out[i], x[i] / root * weight[i], 1e-6), std::string(kernels.name));
    }
  });
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

double gated(Gate kind, double g, double u) {
  if (kind == Gate::silu) {
    return g * sigmoid(g) * u;
  }
  if (kind == Gate::gelu_tanh) {
    return g * 0.5 * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (g + 0.044715 * g * g * g))) * u;
  }
  const double low = std::min(g, 7.0);
  return low * sigmoid(1.702 * low) * (std::clamp(u, -7.0, 7.0) + 1.0);
}

constexpr Gate kGates[] = {Gate::silu, Gate::gelu_tanh, Gate::clamped_silu};

TEST("a gate is that of doubles, however large its numbers are") {
  for_each_length([](const Kernels& kernels, size_t n) {
    for (float scale : {1.0f, 30.0f, 300.0f}) {
      const ExactBuffer<float> gates = numbers(n, 3, scale);
      const ExactBuffer<float> up = numbers(n, 4, 4.0f);
      ExactBuffer<float> out(n);
      for (Gate kind : kGates) {
        kernels.layer.gate(kind, gates.data(), up.data(), n, out.data());
        for (size_t i = 0; i < n; ++i) {
          CHECK_CASE(near(out[i], gated(kind, gates[i], up[i]), 2e-6), std::string(kernels.name));
        }
      }
    }
  });
}

TEST("a NaN or an infinity comes out of a gate as such") {
  for_each_length([](const Kernels& kernels, size_t n) {
    ExactBuffer<float> gates = numbers(n, 5);
    const ExactBuffer<float> up = numbers(n, 6);
    ExactBuffer<float> out(n);
    for (float bad : {NAN, INFINITY}) {
      gates[n / 2] = bad;
      kernels.layer.gate(Gate::silu, gates.data(), up.data(), n, out.data());
      for (size_t i = 0; i < n; ++i) {
        CHECK_CASE(std::isfinite(out[i]) == (i != n / 2), std::string(kernels.name));
      }
    }
  });
}

TEST("a head is turned by its angles, in place as well") {
  for_each_length([](const Kernels& kernels, size_t half) {
    ExactBuffer<float> head = numbers(2 * half, 7);
    ExactBuffer<float> angles(2 * half);
    for (size_t i = 0; i < half; ++i) {
      angles[i] = std::cos(0.1f * static_cast<float>(i));
      angles[half + i] = std::sin(0.1f * static_cast<float>(i));
    }
    ExactBuffer<float> out(2 * half);
    kernels.layer.rotate(head.data(), angles.data(), 2 * half, out.data());
    for (size_t i = 0; i < half; ++i) {
      const double first = head[i];
      const double second = head[half + i];
      const double cosine = angles[i];
      const double sine = angles[half + i];
      CHECK_CASE(near(out[i], first * cosine - second * sine, 1e-6), std::string(kernels.name));
      CHECK_CASE(near(out[half + i], first * sine + second * cosine, 1e-6),
                 std::string(kernels.name));
    }
    kernels.layer.rotate(head.data(), angles.data(), 2 * half, head.data());
    CHECK_CASE(std::memcmp(head.data(), out.data(), 2 * half * sizeof(float)) == 0,
               std::string(kernels.name));
  });
}

TEST("a sum is added where it belongs, and nowhere else") {
  for_each_length([](const Kernels& kernels, size_t n) {
    const ExactBuffer<float> x = numbers(n, 8);
    ExactBuffer<float> to = numbers(n, 9);
    const ExactBuffer<float> before = numbers(n, 9);
    kernels.layer.add(x.data(), n, to.data());
    for (size_t i = 0; i < n; ++i) {
      CHECK_CASE(to[i] == before[i] + x[i], std::string(kernels.name));
    }
  });
}

TEST("a scaled sum is that of doubles, and nowhere else") {
  for_each_length([](const Kernels& kernels, size_t n) {
    const ExactBuffer<float> x = numbers(n, 10);
    ExactBuffer<float> to = numbers(n, 11);
    const ExactBuffer<float> before = numbers(n, 11);
    kernels.layer.add_scaled(x.data(), 0.3f, n, to.data());
    for (size_t i = 0; i < n; ++i) {
      const double want = before[i] + static_cast<double>(0.3f) * x[i];
      CHECK_CASE(near(to[i], want, 1e-6), std::string(kernels.name));
    }
  });
}

TEST("a softmax is that of doubles, however large its numbers are, in place as well") {
  for_each_length([](const Kernels& kernels, size_t n) {
    for (float scale : {1.0f, 30.0f, 1e30f}) {
      ExactBuffer<float> x = numbers(n, 12, scale);
      ExactBuffer<float> out(n);
      kernels.layer.softmax(x.data(), n, out.data());
      double highest = x[0];
      for (size_t i = 0; i < n; ++i) {
        highest = std::max(highest, static_cast<double>(x[i]));
      }
      double sum = 0;
      for (size_t i = 0; i < n; ++i) {
        sum += std::exp(x[i] - highest);
      }
      for (size_t i = 0; i < n; ++i) {
        CHECK_CASE(near(out[i], std::exp(x[i] - highest) / sum, 1e-6), std::string(kernels.name));
      }
      kernels.layer.softmax(x.data(), n, x.data());
      CHECK_CASE(std::memcmp(x.data(), out.data(), n * sizeof(float)) == 0,
                 std::string(kernels.name));
    }
  });
}

TEST("a NaN or an infinity leaves nothing of a softmax") {
  for_each_length([](const Kernels& kernels, size_t n) {
    for (float bad : {NAN, INFINITY}) {
      ExactBuffer<float> x = numbers(n, 13);
      ExactBuffer<float> out(n);
      x[n / 2] = bad;
      kernels.layer.softmax(x.data(), n, out.data());
      for (size_t i = 0; i < n; ++i) {
        CHECK_CASE(std::isnan(out[i]), std::string(kernels.name));
      }
    }
  });
}

}  // namespace
}  // namespace quire::cpu
