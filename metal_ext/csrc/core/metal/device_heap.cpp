#include "core/metal/device_heap.h"

namespace quire::metal {

void DeviceHeap::commit() {
  const std::lock_guard lock(memory_);
  if (committed_ == 0) {
    make();
    committed_ = geometry().heap_bytes();
  }
}

void DeviceHeap::drop() {
  const std::lock_guard lock(memory_);
  if (committed_ > 0) {
    unmake();
    committed_ = 0;
  }
}

void DeviceHeap::release_memory(size_t, size_t) {
  context_->health.require();
  const auto point = context_->mapping_point("a heap cannot be released");
  const std::lock_guard lock(memory_);
  {
    const std::lock_guard books(context_->books);
    context_->require_running();
    ledger_.forget_all();
  }
  if (committed_ == 0 || !releases()) {
    return;
  }
  const uint64_t newest = context_->epochs.newest();
  if (!context_->epochs.wait(newest, context_->health.timeout())) {
    context_->health.time_out("epoch " + std::to_string(newest) + ", before a heap is released");
  }
  context_->epochs.while_idle(context_->health.timeout(), [this] {
    unmake();
    committed_ = 0;
  });
}

}  // namespace quire::metal
