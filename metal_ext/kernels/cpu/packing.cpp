#include "cpu/packing.h"

#include <algorithm>
#include <bit>
#include <cstring>

// Packs weights into panels, and unpacks single rows of weights.
namespace quire::cpu {
namespace {

// Returns the index of a plain number in a panel, from its input and its lane (output). A lane's
// scale and bias lie in their group like the numbers of inputs 0 and 1.
template <class Number>
size_t place_of(size_t input, size_t lane) {
  return sizeof(Number) == 2 ? (input / 2 * kPanelOutputs + lane) * 2 + input % 2
                             : input * kPanelOutputs + lane;
}

// The place of a code in its group: the index of a word, and the first bit within that word.
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

float widened(uint16_t number) {
  return std::bit_cast<float>(static_cast<uint32_t>(number) << 16);
}
float widened(float number) { return number; }

template <class Number>
Number narrowed(float number) {
  if constexpr (sizeof(Number) == 2) {
    return static_cast<uint16_t>(std::bit_cast<uint32_t>(number) >> 16);
  } else {
    return number;
  }
}

// Returns the value of an E8M0 byte, 2^(exponent - 127). Exponent 0 gives a subnormal float32.
float power_of_two(uint32_t exponent) {
  return std::bit_cast<float>(exponent == 0 ? 0x00400000u : exponent << 23);
}

float stored_number(StoredNumber type, const void* numbers, size_t at) {
  switch (type) {
    case StoredNumber::bfloat16: return widened(static_cast<const uint16_t*>(numbers)[at]);
    case StoredNumber::float32: return static_cast<const float*>(numbers)[at];
    default: return power_of_two(static_cast<const uint8_t*>(numbers)[at]);
  }
}

// Reads one output's weights as code * scale + bias. E2M1 codes become numbers (linear.h).
struct CodeRow {
  const Weights& weights;
  size_t inputs;
  size_t row;

  bool floats() const { return weights.kind.numbers == StoredNumber::exponents; }
  float scale(size_t input) const {
    const float scale = stored_number(weights.kind.numbers, weights.scales, place(input));
    return floats() ? scale / 2 : scale;
  }
  float bias(size_t input) const {
    return floats() ? -kE2m1Zero * scale(input)
                    : stored_number(weights.kind.numbers, weights.biases, place(input));
  }
  uint8_t exponent(size_t input) const {
    return static_cast<const uint8_t*>(weights.scales)[place(input)];
  }
  uint32_t code(size_t input) const {
    return floats() ? kE2m1Numbers[stored_code(input)] : stored_code(input);
  }
  uint32_t stored_code(size_t input) const {
    const size_t bits = weights.kind.bits;
    const size_t at = row * (inputs * bits / 8) + input * bits / 8;
    const size_t shift = input * bits % 8;
    const auto* bytes = static_cast<const uint8_t*>(weights.numbers);
    uint32_t word = bytes[at];
    if (shift + bits > 8) {
      word |= static_cast<uint32_t>(bytes[at + 1]) << 8;
    }
    return word >> shift & ((uint32_t{1} << bits) - 1);
  }

 private:
  size_t place(size_t input) const {
    return row * (inputs / weights.kind.group) + input / weights.kind.group;
  }
};

// This function and the next ones pack row `row` of a part as one lane (output) of a panel.
void pack_bfloat16(const LinearShape& shape, const Weights& part, size_t row, size_t lane,
                   std::byte* panel) {
  const auto* from = static_cast<const uint16_t*>(part.numbers) + row * shape.inputs;
  auto* to = reinterpret_cast<uint16_t*>(panel);
  for (size_t i = 0; i < shape.inputs; ++i) {
    to[place_of<uint16_t>(i, lane)] = from[i];
  }
}

void pack_float32(const LinearShape& shape, const Weights& part, size_t row, size_t lane,
                  std::byte* panel) {
  const CodeRow codes{part, shape.inputs, row};
  auto* to = reinterpret_cast<float*>(panel);
  for (size_t i = 0; i < shape.inputs; ++i) {
    to[place_of<float>(i, lane)] =
        part.kind.bits == 0
            ? stored_number(part.kind.numbers, part.numbers, row * shape.inputs + i)
            : static_cast<float>(codes.code(i)) * codes.scale(i) + codes.bias(i);
  }
}

// An exponent that stays a byte belongs to E2M1 codes, which stay what they are, too.
template <class Scale>
constexpr bool kExponents = sizeof(Scale) == 1;

template <class Scale>
void pack_codes(const LinearShape& shape, const Weights& part, size_t row, size_t lane,
                std::byte* panel) {
  const CodeRow codes{part, shape.inputs, row};
  for (size_t g = 0; g < shape.groups(); ++g) {
    std::byte* const group = panel + g * shape.group_bytes();
    auto* scales = reinterpret_cast<Scale*>(group);
    const size_t first = g * shape.group;
    if constexpr (kExponents<Scale>) {
      scales[lane] = codes.exponent(first);
    } else {
      scales[place_of<Scale>(0, lane)] = narrowed<Scale>(codes.scale(first));
      scales[place_of<Scale>(1, lane)] = narrowed<Scale>(codes.bias(first));
    }
    auto* words = reinterpret_cast<uint32_t*>(group + shape.scales_bytes());
    for (size_t i = 0; i < shape.group; ++i) {
      const CodePlace place = place_of_code(shape.bits(), i, lane);
      const size_t input = first + i;
      words[place.word] |= (kExponents<Scale> ? codes.stored_code(input) : codes.code(input))
                           << place.shift;
    }
  }
}

void pack_lane(const LinearShape& shape, const Weights& part, size_t row, size_t lane,
               std::byte* panel) {
  switch (shape.type) {
    case WeightType::bfloat16: return pack_bfloat16(shape, part, row, lane, panel);
    case WeightType::float32: return pack_float32(shape, part, row, lane, panel);
    case WeightType::e2m1: return pack_codes<uint8_t>(shape, part, row, lane, panel);
    default:
      return shape.scales == ScaleType::bfloat16
                 ? pack_codes<uint16_t>(shape, part, row, lane, panel)
                 : pack_codes<float>(shape, part, row, lane, panel);
  }
}

template <class Number>
void unpack_plain(const LinearShape& shape, const std::byte* panel, size_t lane, float* target) {
  const auto* numbers = reinterpret_cast<const Number*>(panel);
  for (size_t i = 0; i < shape.inputs; ++i) {
    target[i] = widened(numbers[place_of<Number>(i, lane)]);
  }
}

template <class Number>
void unpack_codes(const LinearShape& shape, const std::byte* panel, size_t lane, float* target) {
  const uint32_t mask = (uint32_t{1} << shape.bits()) - 1;
  for (size_t g = 0; g < shape.groups(); ++g) {
    const std::byte* const group = panel + g * shape.group_bytes();
    const auto* numbers = reinterpret_cast<const Number*>(group);
    float scale, bias;
    if constexpr (kExponents<Number>) {
      scale = power_of_two(numbers[lane]) / 2;
      bias = -kE2m1Zero * scale;
    } else {
      scale = widened(numbers[place_of<Number>(0, lane)]);
      bias = widened(numbers[place_of<Number>(1, lane)]);
    }
    const auto* words = reinterpret_cast<const uint32_t*>(group + shape.scales_bytes());
    for (size_t i = 0; i < shape.group; ++i) {
      const CodePlace place = place_of_code(shape.bits(), i, lane);
      const uint32_t code = words[place.word] >> place.shift & mask;
      target[g * shape.group + i] =
          static_cast<float>(kExponents<Number> ? kE2m1Numbers[code] : code) * scale + bias;
    }
  }
}

}  // namespace

LinearShape joined_shape(size_t inputs, std::span<const StoredKind> parts) {
  LinearShape shape{0, inputs, WeightType::bits4, SIZE_MAX, ScaleType::bfloat16};
  bool codes = true;
  bool exponents = true;
  for (const StoredKind& part : parts) {
    shape.outputs += part.outputs;
    codes = codes && part.bits != 0;
    if (part.numbers == StoredNumber::float32) {
      shape.scales = ScaleType::float32;
    }
    if (part.bits > 4 || part.numbers == StoredNumber::exponents) {
      shape.type = WeightType::bits8;
    }
    exponents = exponents && part.numbers == StoredNumber::exponents;
    shape.group = std::min(shape.group, part.group);
  }
  if (codes) {
    shape.type = exponents ? WeightType::e2m1 : shape.type;
    return shape;
  }
  const bool narrow = std::ranges::all_of(parts, [](const StoredKind& part) {
    return part.bits == 0 && part.numbers == StoredNumber::bfloat16;
  });
  return {shape.outputs, inputs, narrow ? WeightType::bfloat16 : WeightType::float32};
}

void pack(const LinearShape& shape, std::span<const Weights> parts, size_t first, size_t count,
          std::byte* packed) {
  std::memset(packed + first * shape.panel_bytes(), 0, count * shape.panel_bytes());
  size_t output = 0;  // index of the part's first output
  for (const Weights& part : parts) {
    const size_t from = std::max(output, first * kPanelOutputs);
    const size_t end = std::min(output + part.kind.outputs, (first + count) * kPanelOutputs);
    for (size_t i = from; i < end; ++i) {
      std::byte* const panel = packed + i / kPanelOutputs * shape.panel_bytes();
      pack_lane(shape, part, i - output, i % kPanelOutputs, panel);
    }
    output += part.kind.outputs;
  }
}

void unpack(const LinearShape& shape, const std::byte* packed, size_t output, float* target) {
  const std::byte* const panel = packed + output / kPanelOutputs * shape.panel_bytes();
  const size_t lane = output % kPanelOutputs;
  switch (shape.type) {
    case WeightType::bfloat16: return unpack_plain<uint16_t>(shape, panel, lane, target);
    case WeightType::float32: return unpack_plain<float>(shape, panel, lane, target);
    case WeightType::e2m1: return unpack_codes<uint8_t>(shape, panel, lane, target);
    default:
      return shape.scales == ScaleType::bfloat16
                 ? unpack_codes<uint16_t>(shape, panel, lane, target)
                 : unpack_codes<float>(shape, panel, lane, target);
  }
}

}  // namespace quire::cpu
