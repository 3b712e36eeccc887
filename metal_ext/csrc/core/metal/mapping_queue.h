#pragma once

#include <Metal/Metal.hpp>

#include <cstdint>
#include <mutex>
#include <span>

#include "core/metal/health.h"

namespace quire::metal {

using MappingOperation = MTL4::UpdateSparseBufferMappingOperation;

// The bytes of the three pages that placement sparse buffers can have, and Metal's names for them.
// Throws std::invalid_argument for any other.
MTL::SparsePageSize sparse_page_size(size_t bytes);

// Changes what stands behind sparse buffers, one batch at a time: a call of at most kMaxOperations,
// a signal, and the CPU's wait for it, before the next one begins.
//
//   call | signal 1 | CPU waits | call | signal 2 | CPU waits | ...
//
// So two rules hold by construction: between two batches there is a signal (without one the system
// has been seen to crash), and at most one unmap is outstanding (the kernel's teardown of pages is
// paced). And a mapping has been observed by the CPU when update() returns, before anything that
// uses it is encoded.
class MappingQueue {
 public:
  static constexpr size_t kMaxOperations = 2048;

  // Throws std::system_error(ENOMEM) where the device gives no queue or event.
  MappingQueue(MTL::Device* device, Health& health);

  MTL4::CommandQueue* queue() const { return queue_.get(); }
  // Done when it returns. Ranges and offsets count pages. heap: null where all operations unmap.
  // Throws std::runtime_error when the device does not answer in time, or did not before: what is
  // mapped is in doubt then.
  void update(
      MTL::Buffer* buffer, MTL::Heap* heap, std::span<const MappingOperation> operations);

 private:
  Health& health_;
  std::mutex mutex_;
  NS::SharedPtr<MTL4::CommandQueue> queue_;
  NS::SharedPtr<MTL::SharedEvent> event_;
  uint64_t signalled_ = 0;
};

}  // namespace quire::metal
