#pragma once

#include <Metal/Metal.hpp>

#include <cstdint>
#include <mutex>
#include <span>

#include "core/metal/gpu.h"
#include "metal/arguments.h"

namespace quire::metal {

using MappingOperation = MTL4::UpdateSparseBufferMappingOperation;

// The bytes of the three pages that placement sparse buffers can have, and Metal's names for them.
// Throws std::invalid_argument for any other.
MTL::SparsePageSize sparse_page_size(size_t bytes);

// Changes what stands behind sparse buffers, in batches: calls of at most kMaxOperations, with a
// signal behind each.
//
//   maps:    call | signal 1 | call | signal 2 | ... | CPU waits for the last
//   unmaps:  call | signal 3 | CPU waits | call | signal 4 | CPU waits | ...
//
// So two rules hold by construction: between two batches there is a signal (without one the system
// has been seen to crash), and at most one unmap is outstanding (the kernel's teardown of pages is
// paced). All throw std::runtime_error when the device does not answer in time, or did not before:
// what is mapped is in doubt then. Ranges and offsets count pages.
class MappingQueue {
 public:
  static constexpr size_t kMaxOperations = 2048;

  // Throws std::system_error(ENOMEM) where the device gives no queue or event.
  MappingQueue(MTL::Device* device, Health& health);

  MTL4::CommandQueue* queue() const { return queue_.get(); }
  // Done when finish() has returned: only then may what uses it be encoded.
  void map(MTL::Buffer* buffer, MTL::Heap* heap, std::span<const MappingOperation> operations);
  // Done when it returns, and so are all maps before it.
  void unmap(MTL::Buffer* buffer, std::span<const MappingOperation> operations);
  void finish();

 private:
  using Operations = std::span<const MappingOperation>;

  // Under mutex_. The next batch of these; returns the rest.
  Operations issue(MTL::Buffer* buffer, MTL::Heap* heap, Operations operations);
  void wait();

  Health& health_;
  std::mutex mutex_;
  NS::SharedPtr<MTL4::CommandQueue> queue_;
  NS::SharedPtr<MTL::SharedEvent> event_;
  uint64_t signalled_ = 0;
  size_t outstanding_ = 0;  // operations that the CPU has not seen done
};

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
