#pragma once

#include <Metal/Metal.hpp>

#include "events.h"
#include "memory.h"
#include "residency_set.h"
#include "work_queue.h"

namespace quire::fake {

// An MTL4CommandQueue, for mappings alone. Nothing that is queued on it is retained.
class MappingQueue final : public WorkQueue {
 public:
  using Operation = MTL4::UpdateSparseBufferMappingOperation;

  MappingQueue() : WorkQueue("MTL4CommandQueue") {}

  void update(Buffer* buffer, Heap* heap, const Operation* operations, uint64_t count);
  void signal(Event* event, uint64_t value);
  void add_residency(ResidencySet* set) { residency_.add(set); }
  void remove_residency(ResidencySet* set) { residency_.remove(set); }

 protected:
  void dealloc() override;

 private:
  // Whether the operation can be, by its figures; reports what is wrong.
  bool check(const Buffer& buffer, const Heap* heap, const Operation& operation) const;
  void check_order(bool unmaps);
  // That no command in flight may touch the buffer or the memory.
  void check_idle(bool unmaps, const Buffer& buffer, const Heap* heap) const;
  void apply(Buffer& buffer, Heap* heap, const Operation& operation);

  QueueResidency residency_;
  bool unsignalled_ = false;          // a batch since the last signal
  bool unsignalled_unmaps_ = false;   // and it unmaps
  Event* unmap_event_ = nullptr;      // which the host sees when the last batch of unmaps is done
  uint64_t unmap_value_ = 0;
  std::vector<std::pair<Buffer*, uint64_t>> unsignalled_pages_;
};

}  // namespace quire::fake
