#include "core/metal/resident_set.h"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace quire::metal {

ResidentSet::ResidentSet(MTL::Device* device) {
  const auto descriptor = NS::TransferPtr(MTL::ResidencySetDescriptor::alloc()->init());
  NS::Error* error = nullptr;
  set_ = NS::TransferPtr(device->newResidencySet(descriptor.get(), &error));
  if (!set_) {
    throw std::system_error(ENOMEM, std::generic_category(), "the GPU gives no residency set");
  }
}

bool ResidentSet::fill(std::deque<Member>& waiting, uint64_t size) {
  const size_t before = members_.size();
  const auto fits = [&](uint64_t bytes) { return bytes == 0 || bytes_ + bytes <= size; };
  while (!waiting.empty() && (members_.empty() || fits(waiting.front().bytes))) {
    set_->addAllocation(waiting.front().allocation);
    bytes_ += waiting.front().bytes;
    members_.push_back(waiting.front());
    waiting.pop_front();
  }
  if (members_.size() == before) {
    return false;
  }
  set_->commit();  // only what was committed counts
  return true;
}

bool ResidentSet::holds(const MTL::Allocation* allocation) const {
  return std::any_of(members_.begin(), members_.end(), [allocation](const Member& member) {
    return member.allocation == allocation;
  });
}

void ResidentSet::put_on(MTL::CommandQueue* queue) {
  if (queues_.insert(queue).second) {
    queue->addResidencySet(set_.get());
  }
}

void ResidentSet::put_on(MTL4::CommandQueue* queue) {
  if (mapping_queues_.insert(queue).second) {
    queue->addResidencySet(set_.get());
  }
}

std::vector<ResidentSet::Member> ResidentSet::empty() {
  for (MTL::CommandQueue* queue : std::exchange(queues_, {})) {
    queue->removeResidencySet(set_.get());
  }
  for (MTL4::CommandQueue* queue : std::exchange(mapping_queues_, {})) {
    queue->removeResidencySet(set_.get());
  }
  set_->endResidency();
  set_->removeAllAllocations();
  set_->commit();
  full = false;
  bytes_ = 0;
  return std::exchange(members_, {});
}

}  // namespace quire::metal
