#include <stdexcept>
#include <utility>

#include "core/checked.h"
#include "metal/arguments.h"
#include "ops/metal/layer_rows.h"
#include "ops/metal/ops.h"

// Gated delta nets on a GPU.
namespace quire::ops {
namespace {

constexpr size_t kDim = 128;
constexpr size_t kSimdgroup = 32;

// Encodes three commands. The first one reads all old tails, and the last one overwrites them.
struct GatedDeltaStep {
  DeviceRows rows;
  DeviceStateRows states;
  metal::DeltaArguments arguments;
  metal::Number type;
  metal::Kind kind;

  // `in` has the ordering handle (ops.h), qkv, z, a, b, conv, a_log, dt_bias, norm.
  void encode(
      Encoder& encoder, const std::vector<mx::array>& in, std::vector<mx::array>& out) const {
    const std::vector<mx::array> read = encoder.contiguous_inputs(in, 8);
    out[0].copy_shared_buffer(in[0]);
    allocate_on_device(out[1]);
    const size_t row_count = arguments.rows;
    mx::array mixed = temporary(row_count, mixed_heads() * kDim);
    mx::array gates = temporary(row_count, arguments.value_heads * 2);
    encoder.kernel(metal::delta_prepare_kernel(type, kind));
    encoder.output(out[0], 0);  // for MLX's ordering alone: qkv takes index 0 next
    encoder.inputs({read[0], read[2], read[3], read[4], read[5], read[6]});
    bind_slots(encoder, 6);
    encoder.output(mixed, 9);
    encoder.output(gates, 10);
    encoder.bytes(arguments, 11);
    encoder.run_threads(MTL::Size(mixed_heads() * kSimdgroup, row_count, 1));

    encoder.kernel(metal::delta_scan_kernel(type, kind));
    encoder.output(mixed, 0);
    encoder.input(gates, 1);
    bind_slots(encoder, 2);
    encoder.bytes(arguments, 5);
    constexpr size_t kHeadThreads = kDim / metal::kDeltaStateRows * kSimdgroup;
    encoder.run_groups(MTL::Size(
        arguments.value_heads * kHeadThreads / metal::kScanThreads, arguments.segments, 1));

    encoder.kernel(metal::delta_finish_kernel(type, kind));
    encoder.output(out[0], 0);
    encoder.inputs({mixed, read[1], read[7], read[0]});
    bind_slots(encoder, 4);
    encoder.output(out[1], 7);
    encoder.bytes(arguments, 8);
    encoder.run_threads(
        MTL::Size(arguments.value_heads * kSimdgroup, row_count + arguments.segments, 1));
    encoder.keep(std::move(mixed));
    encoder.keep(std::move(gates));
  }

  // Binds three arrays from index `first` on: segments, writes, and the buffer of all dense slots.
  // MLX sees no use of a slot by address, so the ordering handle alone puts such uses in order.
  void bind_slots(Encoder& encoder, int first) const {
    encoder.input(states->begun(), first);
    encoder.input(states->written(), first + 1);
    if (states->arena()) {
      mx::array arena = *states->arena();
      encoder.output(arena, first + 2);
    } else {
      encoder.input(states->begun(), first + 2);
    }
  }

  size_t mixed_heads() const { return 2 * arguments.key_heads + arguments.value_heads; }
};

void check_arrays(const DeltaShape& shape, const std::vector<mx::array>& arrays) {
  constexpr const char* kNames[] = {"qkv", "z", "a", "b"};
  for (size_t i = 1; i < arrays.size(); ++i) {
    check_same_type("qkv", arrays[0], kNames[i], arrays[i]);
  }
  require<std::invalid_argument>(
      shape.key_dim == kDim && shape.value_dim == kDim, "key_dim is ", shape.key_dim,
      " and value_dim ", shape.value_dim, "; the Metal kernels are built for 128");
}

metal::DeltaArguments arguments_of(
    const GatedDelta& delta, const MetalStateRows& states, int64_t offset) {
  const DeltaShape& shape = delta.shape;
  return {static_cast<uint64_t>(offset), narrowed<uint32_t>("key_heads", shape.key_heads),
          narrowed<uint32_t>("value_heads", shape.value_heads),
          narrowed<uint32_t>("tail_rows", shape.tail_rows), states.segments(),
          static_cast<float>(delta.eps), narrowed<uint32_t>("rows", states.size())};
}

}  // namespace

std::pair<mx::array, mx::array> device::gated_delta(
    const mx::array& token, const mx::array& qkv, const mx::array& z, const mx::array& a,
    const mx::array& b, const Delta& delta, const DeviceStateRows& states, int64_t offset,
    const DeviceMemory& kv_backend) {
  const MetalRows& rows = *states->rows();
  check_rows_of("gated_delta", rows, kv_backend);
  states->require_room(
      offset, delta->shape.state_bytes() + delta->shape.tail_bytes(qkv.itemsize()));
  check_delta(delta->shape, {qkv, z, a, b}, states->size(), offset);
  check_arrays(delta->shape, {qkv, z, a, b});
  require<std::invalid_argument>(
      offset % 16 == 0, "offset is ", offset, "; on a GPU it must be a multiple of 16");
  const metal::Number type = number_of("qkv", qkv.dtype());
  // Slots have no page tables. The paged kind finds them by address, like the sparse kind.
  const metal::Kind kind = states->arena() ? metal::Kind::dense : metal::Kind::sparse;
  GatedDeltaStep step{states->rows(), states, arguments_of(*delta, *states, offset), type, kind};
  const auto results = mx::array::make_arrays(
      {token.shape(), z.shape()}, {token.dtype(), z.dtype()},
      device_operation("gated_delta", std::move(step)),
      {token, qkv, z, a, b, delta->conv, delta->a_log, delta->dt_bias, delta->norm,
       states->begun(), states->written()});
  return {results[0], results[1]};
}

}  // namespace quire::ops
