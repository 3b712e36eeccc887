#pragma once

#include <set>

#include "memory.h"

namespace quire::fake {

// What was added counts for nothing before it was committed, and is resident only when residency
// has been requested since.
class ResidencySet final : public Object {
 public:
  ResidencySet() : Object("MTLResidencySet") {}

  void add(Allocation* allocation);
  void remove(Allocation* allocation);
  void remove_all();
  void commit();
  void request();
  void end();
  bool contains(Allocation* allocation) const { return added_.contains(allocation); }

  bool holds(const Allocation* allocation) const {
    return resident_.contains(const_cast<Allocation*>(allocation));
  }

  int queues = 0;  // that hold it

 protected:
  void dealloc() override;

 private:
  std::set<Allocation*> added_;
  std::set<Allocation*> committed_;
  std::set<Allocation*> resident_;
};

// The sets of a queue.
class QueueResidency {
 public:
  void add(ResidencySet* set);
  void remove(ResidencySet* set);
  bool holds(const Allocation* allocation) const;
  void release_all();

 private:
  std::set<ResidencySet*> sets_;
};

}  // namespace quire::fake
