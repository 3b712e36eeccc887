#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>

#include "core/heap.h"
#include "core/metal/block_ledger.h"
#include "core/metal/context.h"

namespace quire::metal {

// Physical memory of the device. It is released whole, and made again when it is next mapped.
class DeviceHeap : public Heap {
 public:
  explicit DeviceHeap(std::shared_ptr<Context> context)
      : Heap(context->geometry),
        context_(std::move(context)),
        ledger_(geometry().blocks_per_heap()) {}

  size_t committed_bytes() const override { return committed_.load(); }
  bool releases_blocks() const override { return false; }

  // Makes the memory if there is none. Throws std::system_error(ENOMEM) where the device refuses.
  void commit();
  // Gives the memory back, for good: the substrate ends. Nothing maps it.
  void drop();

  // Under Context::books.
  BlockLedger& ledger() { return ledger_; }
  const std::shared_ptr<Context>& context() const { return context_; }

 protected:
  // Rule: a heap is released only when no block of it is mapped and no epoch is in flight. Waits
  // for the latter, where it may be called while one is; where steps follow each other without a
  // pause until the time limit, the heap is kept, and committed_bytes() says so.
  void release_memory(size_t first, size_t count) override;

  // Make, for the next residency set, or throw std::system_error(ENOMEM); take out of its set and
  // let go.
  virtual void make() = 0;
  virtual void unmake() = 0;
  // Whether the device gets the memory back before the substrate ends.
  virtual bool releases() const { return true; }

 private:
  const std::shared_ptr<Context> context_;
  std::mutex memory_;  // held while memory is made or let go of
  std::atomic<size_t> committed_{0};
  BlockLedger ledger_;
};

}  // namespace quire::metal
