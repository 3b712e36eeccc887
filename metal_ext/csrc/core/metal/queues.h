#pragma once

#include <Metal/Metal.hpp>

#include <cstdint>
#include <mutex>
#include <span>

#include "core/metal/gpu.h"
#include "metal/arguments.h"

// The queue that maps sparse buffers, and commands that fill and copy blocks.
namespace quire::metal {

using MappingOperation = MTL4::UpdateSparseBufferMappingOperation;

// Returns Metal's name for pages of 16, 64 or 256 KiB. Throws std::invalid_argument otherwise.
MTL::SparsePageSize sparse_page_size(size_t bytes);

// Maps and unmaps sparse buffers in batches of at most kMaxOperations operations. The range and the
// offset in an operation are in pages, not bytes.
//   maps:    call | signal 1 | call | signal 2 | ... | CPU waits for the last
//   unmaps:  call | signal 3 | CPU waits | call | signal 4 | CPU waits | ...
// A signal stands between any two batches, because the system has crashed without one. Only one
// batch of unmaps runs at a time, to limit the pages that are unmapped together. After a failure or
// a timeout, mappings may be wrong, and all methods throw std::runtime_error.
class MappingQueue {
 public:
  static constexpr size_t kMaxOperations = 2048;

  // Throws std::system_error(ENOMEM) if the device makes no queue or event.
  MappingQueue(MTL::Device* device, Health& health);

  MTL4::CommandQueue* queue() const { return queue_.get(); }
  // The mappings are complete when finish() returns. No command may use the memory before that.
  void map(MTL::Buffer* buffer, MTL::Heap* heap, std::span<const MappingOperation> operations);
  // When the call returns, the memory is unmapped, and all earlier mappings are complete.
  void unmap(MTL::Buffer* buffer, std::span<const MappingOperation> operations);
  void finish();

 private:
  using Operations = std::span<const MappingOperation>;

  // Sends the next batch, and returns the remaining operations. The caller must hold mutex_.
  Operations issue(MTL::Buffer* buffer, MTL::Heap* heap, Operations operations);
  void wait();

  Health& health_;
  std::mutex mutex_;
  NS::SharedPtr<MTL4::CommandQueue> queue_;
  NS::SharedPtr<MTL::SharedEvent> event_;
  uint64_t signalled_ = 0;
  size_t outstanding_ = 0;  // operations that may not be complete yet
};

// Fills and copies blocks by two small kernels, because the CPU cannot access these blocks. A call
// returns when the GPU has finished.
class BlockWork {
 public:
  // Compiles the kernels, or takes those of `other`. Throws std::system_error(ENOMEM) if the device
  // makes no queue or event, and std::runtime_error with the compiler's message.
  BlockWork(MTL::Device* device, Health& health, const BlockWork* other = nullptr);

  MTL::CommandQueue* queue() const { return queue_.get(); }
  // Addresses and strides must be multiples of 16. `bytes` is rounded up to such a multiple. zero()
  // and copy() throw std::runtime_error if the command fails or times out.
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
