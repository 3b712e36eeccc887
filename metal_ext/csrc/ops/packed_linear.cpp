#include "ops/packed_linear.h"

#include <sys/mman.h>

#include <cerrno>
#include <system_error>

#include "core/checked.h"
#include "core/posix_memory.h"
#include "cpu/packing.h"
#include "mlx/ops.h"

namespace quire::ops {
namespace {

// Bytes that a layer may have packed: as many as a range of addresses (core/geometry.cpp).
constexpr size_t kMaxPackedBytes = size_t{1} << 46;

std::invalid_argument cannot(const std::string& what) {
  return std::invalid_argument("a linear layer cannot be packed: " + what);
}

cpu::LinearShape shape_of(const mx::array& weight, const CodeGroups* codes) {
  if (weight.ndim() != 2 || weight.shape(0) < 1 || weight.shape(1) < 1) {
    throw cannot("a weight is not [outputs, inputs]");
  }
  cpu::LinearShape shape{static_cast<size_t>(weight.shape(0)),
                         static_cast<size_t>(weight.shape(1)), cpu::WeightType::float32};
  if (codes == nullptr) {
    if (weight.dtype() == mx::bfloat16) {
      shape.type = cpu::WeightType::bfloat16;
    } else if (weight.dtype() != mx::float32 && weight.dtype() != mx::float16) {
      throw cannot("its numbers are neither float32 nor bfloat16 nor float16");
    }
    return shape;
  }
  if (weight.dtype() != mx::uint32 || (codes->bits != 4 && codes->bits != 8)) {
    throw cannot("codes are uint32 words of 4 or 8 bits each");
  }
  if (codes->group != 32 && codes->group != 64 && codes->group != 128) {
    throw cannot("a group has 32, 64 or 128 inputs, not " + std::to_string(codes->group));
  }
  shape.inputs = shape.inputs * 32 / static_cast<size_t>(codes->bits);
  shape.type = codes->bits == 4 ? cpu::WeightType::bits4 : cpu::WeightType::bits8;
  shape.group = static_cast<size_t>(codes->group);
  const mx::Dtype kept = codes->scales.dtype();
  if (kept != mx::bfloat16 && kept != mx::float32 && kept != mx::float16) {
    throw cannot("its scales are neither float32 nor bfloat16 nor float16");
  }
  shape.scales = kept == mx::bfloat16 ? cpu::ScaleType::bfloat16 : cpu::ScaleType::float32;
  const mx::Shape expected{
      weight.shape(0), narrowed<int>("groups", shape.inputs / shape.group)};
  if (shape.inputs % shape.group != 0 || codes->scales.shape() != expected ||
      codes->biases.shape() != expected || codes->biases.dtype() != codes->scales.dtype()) {
    throw cannot("its scales and biases do not fit its codes");
  }
  return shape;
}

// What the packing reads: contiguous, and float16 as float32.
mx::array readable(const mx::array& x) {
  mx::array plain = mx::contiguous(x.dtype() == mx::float16 ? mx::astype(x, mx::float32) : x);
  plain.eval();
  return plain;
}

const void* start_of(const mx::array& x) { return x.data<std::byte>(); }

}  // namespace

PackedLinear::PackedLinear(const cpu::LinearShape& shape)
    : shape_(shape), bytes_(cpu::rounded_up(shape.packed_bytes(), system_page_bytes())) {
  void* const memory =
      mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(),
                            "mmap of " + std::to_string(bytes_) + " bytes for weights");
  }
#ifdef __linux__
  madvise(memory, bytes_, MADV_HUGEPAGE);  // a wish: small pages do as well, a little slower
#endif
  data_ = static_cast<std::byte*>(memory);
}

PackedLinear::~PackedLinear() { munmap(data_, bytes_); }

Packed pack_linear(
    const std::vector<mx::array>& weights, const std::vector<CodeGroups>& codes,
    const Workers& workers) {
  if (weights.empty() || (!codes.empty() && codes.size() != weights.size())) {
    throw cannot("every weight has codes' scales and biases, or none has");
  }
  std::vector<cpu::LinearShape> parts;
  for (size_t i = 0; i < weights.size(); ++i) {
    parts.push_back(shape_of(weights[i], codes.empty() ? nullptr : &codes[i]));
    const cpu::LinearShape& first = parts.front();
    cpu::LinearShape alike = parts.back();
    alike.outputs = first.outputs;
    if (alike != first) {
      throw cannot("its parts differ in inputs or in how they are stored");
    }
    if (i + 1 < weights.size() && parts.back().outputs % cpu::kPanelOutputs != 0) {
      throw cannot("a part before the last has outputs that do not fill its last panel");
    }
  }
  cpu::LinearShape whole = parts.front();
  whole.outputs = 0;
  for (const cpu::LinearShape& part : parts) {
    whole.outputs += part.outputs;
  }
  narrowed<int>("outputs", whole.outputs);
  narrowed<int>("inputs", whole.inputs);
  if (whole.panels() > kMaxPackedBytes / whole.panel_bytes()) {
    throw cannot("it has more than 2^46 bytes");
  }
  auto packed = std::make_shared<PackedLinear>(whole);
  std::byte* target = packed->data();
  for (size_t i = 0; i < weights.size(); ++i) {
    const mx::array numbers = readable(weights[i]);
    std::optional<mx::array> scales;
    std::optional<mx::array> biases;
    cpu::Weights from{start_of(numbers)};
    if (!codes.empty()) {
      scales = readable(codes[i].scales);
      biases = readable(codes[i].biases);
      from.scales = start_of(*scales);
      from.biases = start_of(*biases);
    }
    const auto held = workers->pool.hold();
    workers->pool.run(parts[i].panels(), [&](size_t panel, size_t) {
      cpu::pack(parts[i], from, panel, 1, target);
    });
    target += parts[i].packed_bytes();
  }
  return packed;
}

}  // namespace quire::ops
