#include "core/metal/mapping_queue.h"

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

#include "core/metal/shared_event.h"

namespace quire::metal {

MTL::SparsePageSize sparse_page_size(size_t bytes) {
  switch (bytes) {
    case size_t{16} << 10:
      return MTL::SparsePageSize16;
    case size_t{64} << 10:
      return MTL::SparsePageSize64;
    case size_t{256} << 10:
      return MTL::SparsePageSize256;
    default:
      throw std::invalid_argument(
          "page_bytes is " + std::to_string(bytes) +
          "; pages of sparse buffers have 16384, 65536 or 262144 bytes");
  }
}

MappingQueue::MappingQueue(MTL::Device* device, Health& health)
    : health_(health),
      queue_(NS::TransferPtr(device->newMTL4CommandQueue())),
      event_(make_shared_event(device)) {
  if (!queue_) {
    throw std::system_error(ENOMEM, std::generic_category(), "the GPU gives no mapping queue");
  }
}

MappingQueue::Operations MappingQueue::issue(
    MTL::Buffer* buffer, MTL::Heap* heap, Operations operations) {
  health_.require();
  const Operations batch = operations.first(std::min(operations.size(), kMaxOperations));
  const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  queue_->updateBufferMappings(buffer, heap, batch.data(), batch.size());
  queue_->signalEvent(event_.get(), ++signalled_);
  outstanding_ += batch.size();
  return operations.subspan(batch.size());
}

void MappingQueue::wait() {
  if (!wait_for_value(event_.get(), signalled_, health_.timeout())) {
    health_.time_out(
        std::to_string(outstanding_) + " mapping operations of sparse buffers, up to batch " +
        std::to_string(signalled_));
  }
  outstanding_ = 0;
}

void MappingQueue::map(MTL::Buffer* buffer, MTL::Heap* heap, Operations operations) {
  const std::lock_guard lock(mutex_);
  while (!operations.empty()) {
    operations = issue(buffer, heap, operations);
  }
}

void MappingQueue::unmap(MTL::Buffer* buffer, Operations operations) {
  const std::lock_guard lock(mutex_);
  while (!operations.empty()) {
    operations = issue(buffer, nullptr, operations);
    wait();
  }
}

void MappingQueue::finish() {
  const std::lock_guard lock(mutex_);
  if (outstanding_ > 0) {
    wait();
  }
}

}  // namespace quire::metal
