#pragma once

#include <cstddef>
#include <cstdint>

// Linear layers compute x [rows][inputs] times the transpose of W [outputs][inputs]. W is packed
// into panels, each with the weights of 16 outputs. Missing outputs of the last panel are zeros.
//   bfloat16     pairs of inputs:    [inputs / 2][16 outputs][2]
//   float32      pairs of inputs:    [inputs / 2][2][16 outputs]
//   4 or 8 bits  groups of inputs:   [groups]{ scales, biases [16], words [n][16] }
//   E2M1         groups of inputs:   [groups]{ exponents (bytes) [16], words [n][16] }
// A word has 32 bits of one output's codes. With 8 bits it has the codes of 4 inputs, one per byte.
// Codes of 4 bits and E2M1 are those of 8 inputs, the first four in the lower halves of the bytes.
namespace quire::cpu {

enum class WeightType { bfloat16, float32, bits4, bits8, e2m1 };
enum class ScaleType { bfloat16, float32 };

// The type to which x may be rounded, if the instruction set multiplies this type. With quantized
// weights, bfloat16 and int8 mean whole numbers of 16 and 8 bits with one scale per group of x.
enum class Activations { float32, bfloat16, int8 };

constexpr size_t kPanelOutputs = 16;
// Plain weights are padded with zeros to a multiple of kInputStep inputs (a tile of a matrix unit).
constexpr size_t kInputStep = 32;

// The largest group of inputs that share a scale.
constexpr size_t kMaxGroup = 128;

// At most this many panels are read at the same time. Processors read more streams more slowly.
constexpr size_t kMostPanels = 4;

// The largest number of rows of x in one call of multiply().
constexpr size_t kMaxRows = 256;

// An E2M1 code is a float of 4 bits (OCP Microscaling Formats 1.0). It stands for one of these
// numbers: twice the float, plus kE2m1Zero. With an exponent e, their scale is 2^(e - 128) and
// their bias -kE2m1Zero * 2^(e - 128).
constexpr uint8_t kE2m1Numbers[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr int kE2m1Zero = 12;

constexpr size_t rounded_up(size_t count, size_t step) { return (count + step - 1) / step * step; }

struct LinearShape {
  size_t outputs;
  size_t inputs;
  WeightType type;
  size_t group = 0;  // number of inputs that share a scale and a bias, if quantized
  ScaleType scales = ScaleType::float32;
  Activations activations = Activations::float32;

  bool operator==(const LinearShape&) const = default;
  constexpr bool quantized() const {
    return type != WeightType::bfloat16 && type != WeightType::float32;
  }
  constexpr size_t bits() const {
    switch (type) {
      case WeightType::bits4:
      case WeightType::e2m1: return 4;
      case WeightType::bits8: return 8;
      case WeightType::bfloat16: return 16;
      default: return 32;
    }
  }
  constexpr size_t padded_inputs() const { return rounded_up(inputs, kInputStep); }
  constexpr size_t panels() const { return (outputs + kPanelOutputs - 1) / kPanelOutputs; }
  constexpr size_t groups() const { return inputs / group; }
  constexpr size_t words_per_group() const { return group * bits() / 32; }
  // Returns the bytes that a group's scales and biases, or exponents, take in a panel.
  constexpr size_t scales_bytes() const {
    return type == WeightType::e2m1 ? kPanelOutputs
                                    : 2 * kPanelOutputs * (scales == ScaleType::bfloat16 ? 2 : 4);
  }
  constexpr size_t group_bytes() const {
    return scales_bytes() + words_per_group() * kPanelOutputs * 4;
  }
  constexpr size_t panel_bytes() const {
    return quantized() ? groups() * group_bytes() : padded_inputs() * kPanelOutputs * bits() / 8;
  }
  constexpr size_t packed_bytes() const { return panels() * panel_bytes(); }
};

// One instruction set's functions for linear layers. Products are added in float32 in the inputs'
// order, or exactly, as whole numbers. So an output's bits depend on one row of x alone.
struct LinearKernels {
  // prepared_bytes() returns the size of `rows` prepared rows. prepare() converts row `row` of x.
  size_t (*prepared_bytes)(const LinearShape&, size_t rows);
  void (*prepare)(const LinearShape&, const float* x, size_t row, std::byte* prepared);

  // Multiplies 1 to kMaxRows prepared rows by the panels [first, first + panels) of the layer
  // `packed`. Writes only these panels' outputs to `out`, whose rows are `out_stride` floats apart.
  void (*multiply)(
      const LinearShape&, const std::byte* packed, const std::byte* prepared, size_t rows,
      size_t first, size_t panels, float* out, size_t out_stride);
};

}  // namespace quire::cpu
