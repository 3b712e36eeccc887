#include "core/metal/device_heap.h"

#include <algorithm>
#include <stdexcept>
#include <string>

// Implements the record of a heap's blocks, and allocates and releases a heap's memory.
namespace quire::metal {

namespace {

[[noreturn]] void refuse(size_t block, const std::string& why) {
  throw std::logic_error("heap block " + std::to_string(block) + " " + why);
}

}  // namespace

void BlockLedger::map_writable(size_t first, size_t count, const void* writer) {
  for (size_t b = first; b < first + count; ++b) {
    if (blocks_[b].mappings > 0) {
      refuse(b, "is mapped already, so that it can get no writable mapping");
    }
  }
  for (size_t b = first; b < first + count; ++b) {
    blocks_[b] = {.mappings = 1, .blank = false, .writer = writer};
  }
  mappings_ += count;
}

void BlockLedger::map_read_only(size_t first, size_t count, uint64_t completed_epoch) {
  for (size_t b = first; b < first + count; ++b) {
    if (blocks_[b].blank) {
      refuse(b, "holds nothing that could be shared");
    }
    if (blocks_[b].written_epoch > completed_epoch) {
      refuse(
          b, "cannot be shared: epoch " + std::to_string(blocks_[b].written_epoch) +
                 ", which writes it, is not complete");
    }
  }
  for (size_t b = first; b < first + count; ++b) {
    blocks_[b].sealed = true;
    ++blocks_[b].mappings;
  }
  mappings_ += count;
}

void BlockLedger::unmap(size_t block, const void* range) {
  if (blocks_[block].mappings == 0) {
    refuse(block, "is not mapped");
  }
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
  if (blocks_[block].sealed) {
    refuse(block, "is sealed: it is never written again");
  }
  if (blocks_[block].writer != writer) {
    refuse(block, "is another range's to write");
  }
}

void BlockLedger::write(size_t block, const void* writer, uint64_t epoch) {
  require_writable(block, writer);
  blocks_[block].written_epoch = std::max(blocks_[block].written_epoch, epoch);
}

void BlockLedger::forget_all() {
  if (mappings_ > 0) {
    throw std::logic_error(
        "a heap cannot be released: " + std::to_string(mappings_) +
        " mappings of its blocks are left");
  }
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
