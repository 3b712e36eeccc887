#include "core/metal/device_heap.h"

#include <algorithm>
#include <stdexcept>

#include "core/checked.h"

// Implements the record of a heap's blocks, and allocates and releases a heap's memory.
namespace quire::metal {

void BlockLedger::map_writable(size_t first, size_t count, const void* writer) {
  for (size_t b = first; b < first + count; ++b) {
    require<std::logic_error>(blocks_[b].mappings == 0, "heap block ", b,
                              " is mapped already, so that it can get no writable mapping");
  }
  for (size_t b = first; b < first + count; ++b) {
    blocks_[b] = {.mappings = 1, .blank = false, .writer = writer};
  }
  mappings_ += count;
}

void BlockLedger::map_read_only(size_t first, size_t count, uint64_t completed_epoch) {
  for (size_t b = first; b < first + count; ++b) {
    require<std::logic_error>(
        !blocks_[b].blank, "heap block ", b, " holds nothing that could be shared");
    require<std::logic_error>(
        blocks_[b].written_epoch <= completed_epoch, "heap block ", b, " cannot be shared: epoch ",
        blocks_[b].written_epoch, ", which writes it, is not complete");
  }
  for (size_t b = first; b < first + count; ++b) {
    blocks_[b].sealed = true;
    ++blocks_[b].mappings;
  }
  mappings_ += count;
}

void BlockLedger::unmap(size_t block, const void* range) {
  require<std::logic_error>(blocks_[block].mappings > 0, "heap block ", block, " is not mapped");
  --blocks_[block].mappings;
  --mappings_;
  if (blocks_[block].writer == range) {
    blocks_[block].writer = nullptr;
  }
}

void BlockLedger::withdraw(size_t first, size_t count) {
  std::fill_n(blocks_.begin() + static_cast<ptrdiff_t>(first), count, Block{});
  mappings_ -= count;
}

void BlockLedger::require_writable(size_t block, const void* writer) const {
  require<std::logic_error>(
      !blocks_[block].sealed, "heap block ", block, " is sealed: it is never written again");
  require<std::logic_error>(
      blocks_[block].writer == writer, "heap block ", block, " is another range's to write");
}

void BlockLedger::write(size_t block, const void* writer, uint64_t epoch) {
  require_writable(block, writer);
  blocks_[block].written_epoch = std::max(blocks_[block].written_epoch, epoch);
}

void BlockLedger::forget_all() {
  require<std::logic_error>(mappings_ == 0, "a heap cannot be released: ", mappings_,
                            " mappings of its blocks are left");
  std::fill(blocks_.begin(), blocks_.end(), Block{});
}

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
  context_->wait_for(context_->epochs.newest(), "a heap is released");
  const auto turn = context_->turns.change();
  context_->epochs.while_idle(context_->health.timeout(), [this] {
    unmake();
    committed_ = 0;
  });
}

}  // namespace quire::metal
