#include <cstring>

#include "commands.h"

namespace quire::fake {
namespace {

constexpr uint64_t kMostThreads = 1024;

const auto defined = [] {
  define("MTLComputeCommandEncoder")
      .method<&ComputeEncoder::set_pipeline>("setComputePipelineState:")
      .method<&ComputeEncoder::set_bytes>("setBytes:length:atIndex:")
      .method<&ComputeEncoder::dispatch_threadgroups>("dispatchThreadgroups:threadsPerThreadgroup:")
      .method<&ComputeEncoder::end>("endEncoding");
  return true;
}();

// What a dispatch needs when it runs.
struct Bindings {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<void*> addresses;
};

}  // namespace

void ComputeEncoder::set_pipeline(Pipeline* pipeline) {
  pipeline_ = pipeline;
  commands_->use(pipeline);
}

void ComputeEncoder::set_bytes(const void* bytes, uint64_t length, uint64_t index) {
  const auto* const first = static_cast<const std::byte*>(bytes);
  bytes_.at(index).assign(first, first + length);
}

void ComputeEncoder::end() {
  if (commands_ == nullptr) {
    report("an encoder was ended twice");
  }
  commands_ = nullptr;
}

void ComputeEncoder::dispatch_threadgroups(MTL::Size grid, MTL::Size threads) {
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
    bindings.addresses[i] = bindings.bytes[i].data();
    if (bindings.addresses[i] == nullptr) {
      bindings.addresses[i] = &commands_;
    }
  }
  std::vector<Access> accesses;
  if (const auto* describe = Machine::current().description(kernel->host_name)) {
    accesses = (*describe)(bindings.addresses.data());
  }
  const auto launch = kernel->over_threadgroups;
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
      });
}

}  // namespace quire::fake
