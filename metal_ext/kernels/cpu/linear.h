#pragma once

#include <cstddef>
#include <cstdint>

// Linear layers, x [rows][inputs] times W [outputs][inputs] transposed, on plain pointers.
//
// W is packed once: 16 outputs make a panel, and inside of a panel the two weights of an output
// that follow each other along the inputs stand side by side. So a panel is read from its beginning
// to its end, by any instructions:
//
//   bfloat16     pairs of inputs:    [inputs / 2][16 outputs][2]
//   float32      the same:           [inputs / 2][2][16 outputs]
//   4 or 8 bits  groups of inputs:   [groups]{ scales, biases [16], words [n][16] }
//
// A word of 32 bits has an output's codes of 4 inputs, a byte each, in their order; or of 8 inputs,
// the first four in the lower halves of its bytes, the others in the upper ones. So a mask, and a
// shift, give bytes that follow each other as x does. What is missing in the last pair, panel or
// 32 inputs is zero.
namespace quire::cpu {

enum class WeightType { bfloat16, float32, bits4, bits8 };
enum class ScaleType { bfloat16, float32 };

// The type that x may be rounded to before it is multiplied, where a set has such products:
// bfloat16, and for codes whole numbers of 16 bits of a group's largest magnitude; or of 8 bits.
enum class Activations { float32, bfloat16, int8 };

constexpr size_t kPanelOutputs = 16;
// Inputs are filled up to a multiple of this: what one tile of a matrix unit takes in.
constexpr size_t kInputStep = 32;

// Inputs that share a scale at most.
constexpr size_t kMaxGroup = 128;

// Panels that are read at the same time: as many streams as processors like best.
constexpr size_t kMostPanels = 4;

// Rows that one multiply takes at most.
constexpr size_t kMaxRows = 256;

constexpr size_t rounded_up(size_t count, size_t step) { return (count + step - 1) / step * step; }

struct LinearShape {
  size_t outputs;
  size_t inputs;
  WeightType type;
  size_t group = 0;  // inputs that share a scale and a bias: a multiple of kInputStep; 4 or 8 bits
  ScaleType scales = ScaleType::float32;
  Activations activations = Activations::float32;

  bool operator==(const LinearShape&) const = default;
  constexpr bool quantized() const {
    return type == WeightType::bits4 || type == WeightType::bits8;
  }
  constexpr size_t bits() const {
    switch (type) {
      case WeightType::bits4: return 4;
      case WeightType::bits8: return 8;
      case WeightType::bfloat16: return 16;
      default: return 32;
    }
  }
  constexpr size_t padded_inputs() const { return rounded_up(inputs, kInputStep); }
  constexpr size_t panels() const { return (outputs + kPanelOutputs - 1) / kPanelOutputs; }
  constexpr size_t groups() const { return inputs / group; }
  constexpr size_t words_per_group() const { return group * bits() / 32; }
  // A scale and a bias of each output of a panel.
  constexpr size_t scales_bytes() const {
    return 2 * kPanelOutputs * (scales == ScaleType::bfloat16 ? 2 : 4);
  }
  constexpr size_t group_bytes() const {
    return scales_bytes() + words_per_group() * kPanelOutputs * 4;
  }
  constexpr size_t panel_bytes() const {
    return quantized() ? groups() * group_bytes() : padded_inputs() * kPanelOutputs * bits() / 8;
  }
  constexpr size_t packed_bytes() const { return panels() * panel_bytes(); }
};

// The products of an instruction set. Sums are in float32, over the inputs in their order, or over
// groups of them whose own sums are whole numbers: one output's bits depend on its own row alone,
// not on the rows beside it.
struct LinearKernels {
  // Rows of x as multiply reads them, on a cache line: for how many rows how many bytes; and a
  // row's part of them.
  size_t (*prepared_bytes)(const LinearShape&, size_t rows);
  void (*prepare)(const LinearShape&, const float* x, size_t row, std::byte* prepared);

  // `panels` panels of outputs from `first` on, for 1 to kMaxRows rows.
  // prepared: what prepare has made of the rows. packed: the whole layer's.
  // out: [rows] of `out_stride` floats, of which those of these panels are written.
  void (*multiply)(
      const LinearShape&, const std::byte* packed, const std::byte* prepared, size_t rows,
      size_t first, size_t panels, float* out, size_t out_stride);
};

}  // namespace quire::cpu
