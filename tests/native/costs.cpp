// One product, made as often as it is told: make arm64-costs beside it counts the instructions.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/linear.h"

using namespace quire::cpu;

// SET, BITS of a weight, ACTIVATIONS, OUTPUTS, INPUTS, ROWS, TIMES. Weights and x are zeros: what
// is done does not depend on them.
int main(int count, char** arguments) {
  if (count != 8) {
    std::fprintf(stderr, "costs SET BITS ACTIVATIONS OUTPUTS INPUTS ROWS TIMES\n");
    return 2;
  }
  const auto number = [&](int place) { return std::strtoul(arguments[place], nullptr, 10); };
  const LinearKernels& kernels = select(arguments[1]).linear;
  const size_t bits = number(2);
  LinearShape shape{.outputs = number(4), .inputs = number(5), .type = WeightType::bfloat16};
  shape.activations = activations_of(arguments[3]);
  if (bits < 16) {
    shape.type = bits == 4 ? WeightType::bits4 : WeightType::bits8;
    shape.group = 64;
    shape.scales = ScaleType::bfloat16;
  }
  const size_t rows = number(6);
  // On cache lines, and zeroed.
  const auto zeros = [](size_t bytes) {
    void* const memory = std::aligned_alloc(64, rounded_up(bytes, 64));
    return static_cast<std::byte*>(__builtin_memset(memory, 0, rounded_up(bytes, 64)));
  };
  const std::byte* const packed = zeros(shape.packed_bytes());
  const auto* const x = reinterpret_cast<const float*>(zeros(shape.inputs * sizeof(float)));
  std::byte* const prepared = zeros(kernels.prepared_bytes(shape, rows));
  for (size_t row = 0; row < rows; ++row) {
    kernels.prepare(shape, x, row, prepared);
  }
  auto* const out = reinterpret_cast<float*>(zeros(rows * shape.outputs * sizeof(float)));
  for (size_t time = 0; time < number(7); ++time) {
    kernels.multiply(shape, packed, prepared, rows, 0, shape.panels(), out, shape.outputs);
  }
}
