#pragma once

#include <Metal/Metal.hpp>

#include <cstdint>
#include <deque>
#include <limits>
#include <set>
#include <vector>

namespace quire::metal {

// One of the device's residency sets, what is in it, and the queues that have it. One thread at a
// time; but for request(), nothing here may be done while a command in flight has the set, except
// to give it to a queue.
class ResidentSet {
 public:
  static constexpr uint64_t kAnySize = std::numeric_limits<uint64_t>::max();

  struct Member {
    const MTL::Allocation* allocation;
    uint64_t bytes;  // of the working set
  };

  // Throws std::system_error(ENOMEM) where the device refuses.
  explicit ResidentSet(MTL::Device* device);

  // Takes members from the front as long as they fit, and one at least into an empty set. False
  // where that is none.
  bool fill(std::deque<Member>& waiting, uint64_t size);
  bool holds(const MTL::Allocation* allocation) const;
  const std::vector<Member>& members() const { return members_; }
  // Once per queue, then free.
  void put_on(MTL::CommandQueue* queue);
  void put_on(MTL4::CommandQueue* queue);
  // Off all queues, and empty; returns what was in it.
  std::vector<Member> empty();
  const NS::SharedPtr<MTL::ResidencySet>& set() const { return set_; }

  bool full = false;  // so that it stays as it is

 private:
  NS::SharedPtr<MTL::ResidencySet> set_;
  std::vector<Member> members_;
  uint64_t bytes_ = 0;
  std::set<MTL::CommandQueue*> queues_;
  std::set<MTL4::CommandQueue*> mapping_queues_;
};

}  // namespace quire::metal
