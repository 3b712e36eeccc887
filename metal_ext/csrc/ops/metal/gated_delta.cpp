#include "ops/gated_delta.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "core/checked.h"
#include "core/metal/kernel_text.h"
#include "metal/arguments.h"
#include "ops/metal/layer.h"
#include "ops/metal/ops.h"
#include "ops/metal/primitive.h"

namespace quire::ops {
namespace {

struct DeltaCall {
  metal::DeltaArguments arguments;
  size_t conv_width;
  metal::Kernel delta;
  metal::Kernel tails;
};

// Inputs: the token; qkv, z, a and b; the layer's conv, a_log, dt_bias and norm; what is begun and
// written. Two commands: a tail is written where every head has read it.
class DeviceGatedDelta final : public RowsPrimitive {
 public:
  DeviceGatedDelta(DeviceStateRows states, DeltaCall call)
      : RowsPrimitive("gated_delta", states->rows()),
        states_(std::move(states)),
        call_(std::move(call)) {}

 protected:
  void encode(
      Encoder& encoder, const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    std::vector<mx::array> read;
    for (size_t i = 1; i <= kRead; ++i) {
      read.push_back(encoder.contiguous(in[i]));
    }
    out[0].copy_shared_buffer(in[0]);
    out[1].set_data(mx::allocator::malloc(out[1].nbytes()));
    encoder.kernel(call_.delta);
    encoder.output(out[0], 0);  // the token; qkv is bound there behind it
    for (int i = 0; i < kRead; ++i) {
      encoder.input(read[static_cast<size_t>(i)], i);
    }
    bind_cells(encoder, kRead);
    encoder.output(out[1], 11);
    encoder.bytes(call_.arguments, 12);
    encoder.run_groups(MTL::Size(call_.arguments.value_heads, call_.arguments.segments, 1));

    encoder.kernel(call_.tails);
    encoder.output(out[0], 0);
    encoder.input(read[0], 0);
    bind_cells(encoder, 1);
    encoder.bytes(call_.arguments, 4);
    encoder.run_threads(MTL::Size(call_.conv_width, call_.arguments.segments, 1));
  }

 private:
  static constexpr int kRead = 8;

  // Segments, writes and the arena at three indices from `first` on. Cells that are found by
  // address are ordered by the token alone.
  void bind_cells(Encoder& encoder, int first) const {
    encoder.input(states_->begun(), first);
    encoder.input(states_->written(), first + 1);
    if (states_->arena()) {
      mx::array arena = *states_->arena();
      encoder.output(arena, first + 2);
    } else {
      encoder.input(states_->begun(), first + 2);
    }
  }

  const DeviceStateRows states_;
  const DeltaCall call_;
};

constexpr int64_t kDim = 128;

void check_arrays(const DeltaShape& shape, const std::vector<mx::array>& arrays, size_t rows) {
  constexpr const char* kNames[] = {"qkv", "z", "a", "b"};
  const auto heads = static_cast<size_t>(shape.value_heads);
  const size_t widths[] = {shape.conv_width(), shape.values_width(), heads, heads};
  for (size_t i = 0; i < arrays.size(); ++i) {
    check_state_input(kNames[i], arrays[i], rows, widths[i]);
    check_same_type("qkv", arrays[0], kNames[i], arrays[i]);
  }
  if (shape.key_dim != kDim || shape.value_dim != kDim) {
    throw std::invalid_argument(
        "key_dim is " + std::to_string(shape.key_dim) + " and value_dim " +
        std::to_string(shape.value_dim) + "; the Metal kernels are built for 128");
  }
}

metal::DeltaArguments arguments_of(
    const GatedDelta& delta, const MetalStateRows& states, int64_t offset) {
  const DeltaShape& shape = delta.shape;
  return {static_cast<uint64_t>(offset), narrowed<uint32_t>("key_heads", shape.key_heads),
          narrowed<uint32_t>("value_heads", shape.value_heads),
          narrowed<uint32_t>("tail_rows", shape.tail_rows), states.segments(),
          static_cast<float>(delta.eps), 0};
}

}  // namespace

std::pair<mx::array, mx::array> gated_delta(
    const mx::array& token, const mx::array& qkv, const mx::array& z, const mx::array& a,
    const mx::array& b, const Delta& delta, const DeviceStateRows& states, int64_t offset,
    const DeviceMemory& substrate) {
  const MetalRows& rows = *states->rows();
  check_rows_of("gated_delta", rows, substrate);
  check_arrays(delta->shape, {qkv, z, a, b}, rows.size());
  states->require_room(
      offset, delta->shape.state_bytes() + delta->shape.tail_bytes(qkv.itemsize()));
  constexpr int64_t kNumber = sizeof(float);
  if (offset % kNumber != 0) {
    throw std::invalid_argument(
        "offset is " + std::to_string(offset) + "; it must be a multiple of 4");
  }
  const metal::Number type = number_of("qkv", qkv.dtype());
  // Cells have no page tables: on paged they are found by address, as on sparse.
  const metal::Kind kind = states->arena() ? metal::Kind::dense : metal::Kind::sparse;
  DeltaCall call{
      arguments_of(*delta, *states, offset), delta->shape.conv_width(),
      metal::gated_delta_kernel(type, kind), metal::delta_tails_kernel(type, kind)};
  auto made = mx::array::make_arrays(
      {token.shape(), z.shape()}, {token.dtype(), z.dtype()},
      std::make_shared<DeviceGatedDelta>(states, std::move(call)),
      {token, qkv, z, a, b, delta->conv, delta->a_log, delta->dt_bias, delta->norm,
       states->begun(), states->written()});
  return {made[0], made[1]};
}

}  // namespace quire::ops
