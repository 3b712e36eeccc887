#include "cpu/packing.h"

#include <cstring>

namespace quire::cpu {
namespace {

// Where a number of an output and an input lies in a panel, in numbers.
size_t place_of_bfloat16(size_t input, size_t lane) {
  return (input / 2 * kPanelOutputs + lane) * 2 + input % 2;
}
size_t place_of_float32(size_t input, size_t lane) { return input * kPanelOutputs + lane; }

// Codes: which word of its group, and by how many bits it is shifted there.
struct CodePlace {
  size_t word;
  uint32_t shift;
};
CodePlace place_of_code(size_t bits, size_t input, size_t lane) {
  const size_t pairs = 16 / bits;
  const size_t pair = input / 2;
  return {pair / pairs * kPanelOutputs + lane,
          static_cast<uint32_t>(pair % 2 * 16 + pair % pairs / 2 * bits + input % 2 * 8)};
}

template <class Number, class Place>
void pack_numbers(const LinearShape& shape, const void* numbers, size_t first, size_t outputs,
                  std::byte* panel, const Place& place) {
  const auto* from = static_cast<const Number*>(numbers);
  auto* to = reinterpret_cast<Number*>(panel);
  for (size_t lane = 0; lane < outputs; ++lane) {
    for (size_t i = 0; i < shape.inputs; ++i) {
      to[place(i, lane)] = from[(first + lane) * shape.inputs + i];
    }
  }
}

template <class Number>
struct Scales {
  const Number* scales;
  const Number* biases;

  // As pairs of bfloat16 stand, or as those of float32 do.
  static size_t place(size_t number, size_t lane) {
    return sizeof(Number) == 2 ? place_of_bfloat16(number, lane) : place_of_float32(number, lane);
  }
};

template <class Number>
void pack_scales(const LinearShape& shape, const Weights& weights, size_t output, size_t lane,
                 size_t group, std::byte* to) {
  const size_t from = output * shape.groups() + group;
  auto* numbers = reinterpret_cast<Number*>(to);
  numbers[Scales<Number>::place(0, lane)] = static_cast<const Number*>(weights.scales)[from];
  numbers[Scales<Number>::place(1, lane)] = static_cast<const Number*>(weights.biases)[from];
}

uint32_t code_of(const LinearShape& shape, const uint32_t* row, size_t input) {
  const size_t in_a_word = 32 / shape.bits();
  const uint32_t mask = (uint32_t{1} << shape.bits()) - 1;
  return row[input / in_a_word] >> (input % in_a_word * shape.bits()) & mask;
}

void pack_codes(const LinearShape& shape, const Weights& weights, size_t first, size_t outputs,
                std::byte* panel) {
  const size_t row_words = shape.inputs * shape.bits() / 32;
  for (size_t lane = 0; lane < outputs; ++lane) {
    const uint32_t* row =
        static_cast<const uint32_t*>(weights.numbers) + (first + lane) * row_words;
    for (size_t g = 0; g < shape.groups(); ++g) {
      std::byte* const group = panel + g * shape.group_bytes();
      if (shape.scales == ScaleType::bfloat16) {
        pack_scales<uint16_t>(shape, weights, first + lane, lane, g, group);
      } else {
        pack_scales<float>(shape, weights, first + lane, lane, g, group);
      }
      auto* words = reinterpret_cast<uint32_t*>(group + shape.scales_bytes());
      for (size_t i = 0; i < shape.group; ++i) {
        const CodePlace place = place_of_code(shape.bits(), i, lane);
        words[place.word] |= code_of(shape, row, g * shape.group + i) << place.shift;
      }
    }
  }
}

float widened(uint16_t number) {
  const uint32_t bits = static_cast<uint32_t>(number) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
float widened(float number) { return number; }

template <class Number>
void unpack_codes(const LinearShape& shape, const std::byte* panel, size_t lane, float* target) {
  const uint32_t mask = (uint32_t{1} << shape.bits()) - 1;
  for (size_t g = 0; g < shape.groups(); ++g) {
    const std::byte* const group = panel + g * shape.group_bytes();
    const auto* numbers = reinterpret_cast<const Number*>(group);
    const float scale = widened(numbers[Scales<Number>::place(0, lane)]);
    const float bias = widened(numbers[Scales<Number>::place(1, lane)]);
    const auto* words = reinterpret_cast<const uint32_t*>(group + shape.scales_bytes());
    for (size_t i = 0; i < shape.group; ++i) {
      const CodePlace place = place_of_code(shape.bits(), i, lane);
      const uint32_t code = words[place.word] >> place.shift & mask;
      target[g * shape.group + i] = static_cast<float>(code) * scale + bias;
    }
  }
}

}  // namespace

void pack(const LinearShape& shape, const Weights& weights, size_t first, size_t count,
          std::byte* packed) {
  for (size_t p = first; p < first + count; ++p) {
    std::byte* const panel = packed + p * shape.panel_bytes();
    std::memset(panel, 0, shape.panel_bytes());
    const size_t output = p * kPanelOutputs;
    const size_t left = shape.outputs - output;
    const size_t outputs = left < kPanelOutputs ? left : kPanelOutputs;
    switch (shape.type) {
      case WeightType::bfloat16:
        pack_numbers<uint16_t>(shape, weights.numbers, output, outputs, panel, place_of_bfloat16);
        break;
      case WeightType::float32:
        pack_numbers<float>(shape, weights.numbers, output, outputs, panel, place_of_float32);
        break;
      default:
        pack_codes(shape, weights, output, outputs, panel);
    }
  }
}

void unpack(const LinearShape& shape, const std::byte* packed, size_t output, float* target) {
  const std::byte* const panel = packed + output / kPanelOutputs * shape.panel_bytes();
  const size_t lane = output % kPanelOutputs;
  switch (shape.type) {
    case WeightType::bfloat16:
      for (size_t i = 0; i < shape.inputs; ++i) {
        target[i] = widened(reinterpret_cast<const uint16_t*>(panel)[place_of_bfloat16(i, lane)]);
      }
      break;
    case WeightType::float32:
      for (size_t i = 0; i < shape.inputs; ++i) {
        target[i] = reinterpret_cast<const float*>(panel)[place_of_float32(i, lane)];
      }
      break;
    default:
      if (shape.scales == ScaleType::bfloat16) {
        unpack_codes<uint16_t>(shape, panel, lane, target);
      } else {
        unpack_codes<float>(shape, panel, lane, target);
      }
  }
}

}  // namespace quire::cpu
