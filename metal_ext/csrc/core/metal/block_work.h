#pragma once

#include <Metal/Metal.hpp>

#include <cstdint>
#include <mutex>
#include <span>

#include "core/metal/health.h"
#include "metal/arguments.h"

namespace quire::metal {

// Fills and copies blocks of memory that the CPU cannot reach, by two small kernels on a queue of
// our own. All is done when a call returns.
class BlockWork {
 public:
  // Compiles the kernels. Throws std::system_error(ENOMEM) where the device gives no queue or
  // event, std::runtime_error with the compiler's words where it refuses the kernels.
  BlockWork(MTL::Device* device, Health& health);

  MTL::CommandQueue* queue() const { return queue_.get(); }
  // In units of 16 bytes: addresses and strides are multiples of it, a rest of `bytes` counts full.
  // Both throw std::runtime_error when the command fails or does not end in time.
  void zero(std::span<const BlockArguments> runs) { run(zero_.get(), "zero_blocks", runs); }
  void copy(std::span<const BlockArguments> runs) { run(copy_.get(), "copy_blocks", runs); }

 private:
  void run(
      MTL::ComputePipelineState* kernel, const char* name, std::span<const BlockArguments> runs);
  void wait(MTL::CommandBuffer* commands, const char* name);

  Health& health_;
  std::mutex mutex_;
  NS::SharedPtr<MTL::CommandQueue> queue_;
  NS::SharedPtr<MTL::SharedEvent> event_;
  NS::SharedPtr<MTL::ComputePipelineState> zero_;
  NS::SharedPtr<MTL::ComputePipelineState> copy_;
  uint64_t signalled_ = 0;
};

}  // namespace quire::metal
