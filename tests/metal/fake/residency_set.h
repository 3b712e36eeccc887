#pragma once

#include <chrono>
#include <set>

#include "memory.h"

namespace quire::fake {

// What was added counts for nothing before it was committed, and is resident only when residency
// has been requested since. As on macOS 26, it is so for a second after the last request, or the
// last command of a queue that has the set.
class ResidencySet final : public Object {
 public:
  ResidencySet() : Object("MTLResidencySet") {}

  void add(Allocation* allocation);
  void remove_all();
  void commit();
  void request();
  void end();

  // Whether residency has ever been requested for it here.
  bool holds(const Allocation* allocation) const {
    return resident_.contains(const_cast<Allocation*>(allocation));
  }
  const std::set<Allocation*>& resident() const { return resident_; }
  // Whether it was used or requested less than a second ago.
  bool fresh() const;
  void use();

  int queues = 0;  // that hold it

 protected:
  void dealloc() override;

 private:
  std::set<Allocation*> added_;
  std::set<Allocation*> committed_;
  std::set<Allocation*> resident_;
  std::chrono::nanoseconds last_use_{};
};

// The sets of a queue.
class QueueResidency {
 public:
  void add(ResidencySet* set);
  void remove(ResidencySet* set);
  bool holds(const Allocation* allocation) const;
  // The same, and it is resident now.
  bool has_resident(const Allocation* allocation) const;
  const std::set<ResidencySet*>& sets() const { return sets_; }
  void release_all();

 private:
  std::set<ResidencySet*> sets_;
};

}  // namespace quire::fake
