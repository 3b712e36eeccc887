#include "residency_set.h"

#include <algorithm>

#include "commands.h"

namespace quire::fake {
namespace {

constexpr std::chrono::seconds kResidentAfterUse{1};
// Metal's feature set tables.
constexpr size_t kMostSetsOfQueue = 32;

// What may not be while a command in flight has the set.
void require_unused(const ResidencySet* set, const char* what) {
  for (const CommandBuffer* commands : Machine::current().in_flight) {
    if (commands->has(set)) {
      report(std::string("a residency set ") + what + " while a command in flight has it");
      return;
    }
  }
}

class ResidencySetDescriptor final : public Object {
 public:
  ResidencySetDescriptor() : Object("MTLResidencySetDescriptor") {}
};

const auto defined = [] {
  define("MTLResidencySetDescriptor").makes<ResidencySetDescriptor>();
  define("MTLResidencySet")
      .method<&ResidencySet::add>("addAllocation:")
      .method<&ResidencySet::remove_all>("removeAllAllocations")
      .method<&ResidencySet::commit>("commit")
      .method<&ResidencySet::request>("requestResidency")
      .method<&ResidencySet::end>("endResidency");
  return true;
}();

}  // namespace

void ResidencySet::add(Allocation* allocation) {
  const std::lock_guard lock(Machine::current().mutex);
  added_.insert(allocation);
}

void ResidencySet::remove_all() {
  const std::lock_guard lock(Machine::current().mutex);
  added_.clear();
}

void ResidencySet::commit() {
  const std::lock_guard lock(Machine::current().mutex);
  if (added_ != committed_) {
    require_unused(this, "changed");
  }
  for (Allocation* allocation : added_) {
    if (!committed_.contains(allocation)) {
      ++allocation->in_residency_sets;
    }
  }
  for (Allocation* allocation : committed_) {
    if (!added_.contains(allocation)) {
      --allocation->in_residency_sets;
      resident_.erase(allocation);
      for (const CommandBuffer* commands : Machine::current().in_flight) {
        if (commands->uses(allocation)) {
          report("an allocation left a residency set while a command in flight uses it");
        }
      }
    }
  }
  committed_ = added_;
}

void ResidencySet::request() {
  const std::lock_guard lock(Machine::current().mutex);
  resident_ = committed_;
  ++Machine::current().residency_requests;
  use();
}

bool ResidencySet::fresh() const {
  return Machine::current().now - last_use_ <= kResidentAfterUse;
}

void ResidencySet::use() { last_use_ = Machine::current().now; }

void ResidencySet::end() {
  const std::lock_guard lock(Machine::current().mutex);
  require_unused(this, "ended");
  resident_.clear();
}

void ResidencySet::dealloc() {
  const std::lock_guard lock(Machine::current().mutex);
  if (queues > 0) {
    report("a residency set was released while a queue has it");
  }
  for (Allocation* allocation : committed_) {
    --allocation->in_residency_sets;
  }
}

void QueueResidency::add(ResidencySet* set) {
  const std::lock_guard lock(Machine::current().mutex);
  if (sets_.insert(set).second) {
    ++set->queues;
  } else {
    report("a residency set was added to a queue that has it");
  }
  if (sets_.size() > kMostSetsOfQueue) {
    report("a queue has " + std::to_string(sets_.size()) + " residency sets");
  }
}

void QueueResidency::remove(ResidencySet* set) {
  const std::lock_guard lock(Machine::current().mutex);
  if (sets_.erase(set) > 0) {
    --set->queues;
    require_unused(set, "was taken off a queue");
  } else {
    report("a residency set was removed from a queue that does not have it");
  }
}

bool QueueResidency::holds(const Allocation* allocation) const {
  return std::any_of(sets_.begin(), sets_.end(), [allocation](const ResidencySet* set) {
    return set->holds(allocation);
  });
}

bool QueueResidency::has_resident(const Allocation* allocation) const {
  return std::any_of(sets_.begin(), sets_.end(), [allocation](const ResidencySet* set) {
    return set->holds(allocation) && set->fresh();
  });
}

void QueueResidency::release_all() {
  for (ResidencySet* set : sets_) {
    --set->queues;
  }
  sets_.clear();
}

}  // namespace quire::fake
