#include "ops/metal/encoder.h"

#include <algorithm>
#include <stdexcept>

#include "core/checked.h"
#include "mlx/backend/metal/device.h"
#include "ops/metal/on_device.h"

// Implements the encoder of operations over a GPU's memory.
namespace quire::ops {
namespace {

constexpr size_t kVector = 4;  // the most numbers of an array that kernels load at once

// Gives access to a private method of MLX's encoder. Explicit instantiations ignore access rights.
template <class Tag, typename Tag::Member member>
struct Reach {
  friend typename Tag::Member reach(Tag) { return member; }
};
struct ComputeEncoder {
  using Member = MTL::ComputeCommandEncoder* (mx::metal::CommandEncoder::*)();
  friend Member reach(ComputeEncoder);
};
template struct Reach<ComputeEncoder, &mx::metal::CommandEncoder::get_command_encoder>;

mx::metal::CommandEncoder& checked_encoder(const mx::Stream& stream, const char* operation) {
  require_device_stream(stream, operation);
  return mx::metal::get_command_encoder(stream);
}

}  // namespace

Encoder::Encoder(const mx::Stream& stream, const char* operation)
    : stream_(stream), encoder_(checked_encoder(stream, operation)) {}

void Encoder::use(MetalKVBackend& kv_backend) {
  auto* const commands = encoder_.get_command_buffer();
  if (kv_backend.newest_commands.get() != commands) {
    kv_backend.newest_commands = NS::RetainPtr(commands);
    ++kv_backend.command_buffers;
  }
  kv_backend.memory->residency().attach(commands->commandQueue());
  const auto resources = kv_backend.memory->residency().unattached();
  if (resources.empty()) {
    return;
  }
  auto* const encoder = (encoder_.*reach(ComputeEncoder{}))();
  if (kv_backend.told.get() != encoder || kv_backend.told_resources != resources.size()) {
    encoder->useResources(
        resources.data(), resources.size(), MTL::ResourceUsageRead | MTL::ResourceUsageWrite);
    kv_backend.told = NS::RetainPtr(encoder);
    kv_backend.told_resources = resources.size();
  }
}

mx::array Encoder::contiguous(const mx::array& array) {
  if (array.flags().row_contiguous && array.offset() % (kVector * array.itemsize()) == 0) {
    return array;
  }
  mx::array given(array.shape(), array.dtype(), nullptr, {});
  given.copy_shared_buffer(array, array.strides(), {}, array.data_size());  // for MLX to copy it
  mx::array copy = ordered_copy(given, stream_);
  keep(copy);
  return copy;
}

void Encoder::after(const mx::array& array) {
  // Binding makes MLX record a use. At index 0 the kernel's own array later replaces this one.
  encoder_.set_input_array(array, 0);
}

void Encoder::kernel(const metal::Kernel& kernel) {
  auto& device = mx::metal::device(mx::Device::gpu);
  auto* const library = device.get_library(
      "quire_" + kernel.name, [&] { return metal::library_text({kernel}); });
  auto* const pipeline = device.get_kernel(kernel.name, library);
  const size_t most = pipeline->maxTotalThreadsPerThreadgroup();
  require<std::runtime_error>(
      kernel.threads <= most, "this GPU runs ", kernel.name, " with ", most,
      " threads per group at most; ", kernel.threads, " are needed");
  encoder_.set_compute_pipeline_state(pipeline);
  threads_ = kernel.threads;
}

void Encoder::input(const mx::array& array, int index, int64_t offset_bytes) {
  encoder_.set_input_array(array, index, offset_bytes);
}

void Encoder::output(mx::array& array, int index) {
  encoder_.set_output_array(array, index);
}

void Encoder::set_bytes(const void* value, size_t count, int index) {
  encoder_.set_bytes(static_cast<const std::byte*>(value), narrowed<int>("bytes", count), index);
}

void Encoder::run_threads(MTL::Size threads) {
  const size_t group = std::min<size_t>(threads.width, threads_);
  encoder_.dispatch_threads(threads, MTL::Size(group, 1, 1));
}

void Encoder::run_groups(MTL::Size groups) {
  encoder_.dispatch_threadgroups(groups, MTL::Size(threads_, 1, 1));
}

void Encoder::keep(mx::array temporary) {
  encoder_.add_temporary(std::move(temporary));
}

void Encoder::signal(MTL::SharedEvent* event, uint64_t value) {
  encoder_.end_encoding(/*wait_in_flight=*/true);
  encoder_.get_command_buffer()->encodeSignalEvent(event, value);
}

}  // namespace quire::ops
