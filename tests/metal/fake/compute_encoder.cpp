#include <cstring>

#include "commands.h"

namespace quire::fake {
namespace {

constexpr uint64_t kMostThreads = 1024;

const auto defined = [] {
  define("MTLComputeCommandEncoder")
      .method<&ComputeEncoder::set_pipeline>("setComputePipelineState:")
      .method<&ComputeEncoder::set_buffer>("setBuffer:offset:atIndex:")
      .method<&ComputeEncoder::set_bytes>("setBytes:length:atIndex:")
      .method<&ComputeEncoder::dispatch_threadgroups>("dispatchThreadgroups:threadsPerThreadgroup:")
      .method<&ComputeEncoder::dispatch_threads>("dispatchThreads:threadsPerThreadgroup:")
      .method<&ComputeEncoder::use_resource>("useResource:usage:")
      .method<&ComputeEncoder::barrier>("memoryBarrierWithScope:")
      .method<&ComputeEncoder::end>("endEncoding");
  return true;
}();

// What a dispatch needs when it runs: bytes by value, buffers by address.
struct Bindings {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<void*> addresses;
};

}  // namespace

void ComputeEncoder::set_pipeline(Pipeline* pipeline) {
  pipeline_ = pipeline;
  commands_->use(pipeline);
}

void ComputeEncoder::set_buffer(Buffer* buffer, uint64_t offset, uint64_t index) {
  if (offset >= buffer->length()) {
    report("a buffer was bound beyond its end");
  }
  addresses_.at(index) = buffer->gpu_address() + offset;
  bound_.insert(buffer);
  commands_->use(buffer);
}

void ComputeEncoder::set_bytes(const void* bytes, uint64_t length, uint64_t index) {
  const auto* const first = static_cast<const std::byte*>(bytes);
  bytes_.at(index).assign(first, first + length);
  addresses_.at(index) = 0;
}

void ComputeEncoder::use_resource(Buffer* buffer, uint64_t) {
  bound_.insert(buffer);
  commands_->use(buffer);
}

void ComputeEncoder::barrier(uint64_t) {}

void ComputeEncoder::end() {
  if (commands_ == nullptr) {
    report("an encoder was ended twice");
  }
  commands_ = nullptr;
}

void ComputeEncoder::dispatch_threadgroups(MTL::Size grid, MTL::Size threads) {
  dispatch(grid, threads, false);
}

void ComputeEncoder::dispatch_threads(MTL::Size grid, MTL::Size threads) {
  dispatch(grid, threads, true);
}

void ComputeEncoder::dispatch(MTL::Size grid, MTL::Size threads, bool counts_threads) {
  if (pipeline_ == nullptr || commands_ == nullptr) {
    report("a dispatch has no pipeline state, or stands behind the end of its encoder");
    return;
  }
  const msl_kernel* const kernel = pipeline_->kernel();
  const uint64_t group = threads.width * threads.height * threads.depth;
  if (group == 0 || group > kernel->max_threads || group > kMostThreads ||
      grid.width * grid.height * grid.depth == 0) {
    report("a dispatch of " + std::string(kernel->host_name) + " has a size that cannot be");
    return;
  }
  Bindings bindings;
  bindings.addresses.resize(kBindings, bindings.addresses.data());
  for (size_t i = 0; i < kBindings; ++i) {
    bindings.bytes.push_back(bytes_[i]);
    // Never null: kernels that do not use an argument still take it.
    bindings.addresses[i] = addresses_[i] != 0 ? reinterpret_cast<void*>(addresses_[i])
                                               : bindings.bytes[i].data();
    if (bindings.addresses[i] == nullptr) {
      bindings.addresses[i] = &commands_;
    }
  }
  std::vector<Access> accesses;
  if (const auto* describe = Machine::current().description(kernel->host_name)) {
    accesses = (*describe)(bindings.addresses.data());
  }
  const auto launch = counts_threads ? kernel->over_threads : kernel->over_threadgroups;
  commands_->encode(
      kernel->host_name, std::move(accesses),
      [launch, grid, threads, bindings = std::move(bindings)]() mutable {
        const unsigned sizes[] = {static_cast<unsigned>(grid.width),
                                  static_cast<unsigned>(grid.height),
                                  static_cast<unsigned>(grid.depth)};
        const unsigned each[] = {static_cast<unsigned>(threads.width),
                                 static_cast<unsigned>(threads.height),
                                 static_cast<unsigned>(threads.depth)};
        launch(bindings.addresses.data(), sizes, each);
      },
      bound_);
}

}  // namespace quire::fake
