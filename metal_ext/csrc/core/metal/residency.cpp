#include "core/metal/residency.h"

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace quire::metal {

Residency::Residency(MTL::Device* device, bool supported) {
  if (!supported) {
    return;
  }
  const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  const auto descriptor = NS::TransferPtr(MTL::ResidencySetDescriptor::alloc()->init());
  NS::Error* error = nullptr;
  set_ = NS::TransferPtr(device->newResidencySet(descriptor.get(), &error));
  if (!set_) {
    throw std::system_error(ENOMEM, std::generic_category(), "the GPU gives no residency set");
  }
}

// Only what was committed counts, and only what was requested is resident before its first use.
void Residency::insert(const MTL::Allocation* allocation) {
  const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  set_->addAllocation(allocation);
  set_->commit();
  set_->requestResidency();
}

void Residency::erase(const MTL::Allocation* allocation) {
  const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  set_->removeAllocation(allocation);
  set_->commit();
}

void Residency::add(MTL::Buffer* buffer) {
  const std::lock_guard lock(mutex_);
  if (set_) {
    insert(buffer);
  } else {
    unattached_.push_back(buffer);
  }
}

void Residency::add(MTL::Heap* heap) {
  const std::lock_guard lock(mutex_);
  insert(heap);  // heaps are for the sparse kind, which needs residency sets
}

void Residency::remove(MTL::Buffer* buffer) {
  const std::lock_guard lock(mutex_);
  if (set_) {
    erase(buffer);
  } else {
    std::erase(unattached_, buffer);
  }
}

void Residency::remove(MTL::Heap* heap) {
  const std::lock_guard lock(mutex_);
  if (set_) {
    erase(heap);
  }
}

template <class Queue>
void Residency::attach_to(
    Queue* queue, std::unordered_map<Queue*, NS::SharedPtr<Queue>>& attached) {
  const std::lock_guard lock(mutex_);
  if (set_ && !attached.contains(queue)) {
    queue->addResidencySet(set_.get());
    attached.emplace(queue, NS::RetainPtr(queue));
  }
}

void Residency::attach(MTL::CommandQueue* queue) {
  attach_to(queue, queues_);
}

void Residency::attach(MTL4::CommandQueue* queue) {
  attach_to(queue, mapping_queues_);
}

std::vector<MTL::Resource*> Residency::unattached() const {
  const std::lock_guard lock(mutex_);
  return unattached_;
}

void Residency::end() {
  const std::lock_guard lock(mutex_);
  unattached_.clear();
  if (!set_) {
    return;
  }
  const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  for (const auto& [queue, kept] : queues_) {
    queue->removeResidencySet(set_.get());
  }
  for (const auto& [queue, kept] : mapping_queues_) {
    queue->removeResidencySet(set_.get());
  }
  queues_.clear();
  mapping_queues_.clear();
  set_->removeAllAllocations();
  set_->commit();
  set_->endResidency();
  set_.reset();
}

}  // namespace quire::metal
