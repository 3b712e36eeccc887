#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/heap.h"
#include "core/metal/context.h"

namespace quire::metal {

// The state of every block of one heap: its mappings, its writer, and whether it is sealed. Not
// thread-safe: the substrate's books have one mutex. All throw std::logic_error.
//
//   blank -- writable mapping --> owned -- read-only mapping, its writes complete --> sealed
//
// A sealed block is never written. It becomes owned again by a new writable mapping, which needs
// that nothing maps it any more.
class BlockLedger {
 public:
  explicit BlockLedger(size_t blocks) : blocks_(blocks) {}

  // Puts the blocks behind the addresses of `writer`, which alone may write them. Rule: a block
  // gets a writable mapping only when nothing maps it.
  void map_writable(size_t first, size_t count, const void* writer);
  // Rule: a block is shared only when the epoch of its last write is complete, and from then on it
  // is sealed.
  void map_read_only(size_t first, size_t count, uint64_t completed_epoch);
  // One mapping fewer, the writer's if `range` is the writer.
  void unmap(size_t block, const void* range);

  // Takes a mapping back that did not come about, because the heap's memory was refused.
  void withdraw(size_t first, size_t count);

  // A step writes the block. Rules: only its writer writes a block, and a sealed one is never
  // written.
  void require_writable(size_t block, const void* writer) const;
  void write(size_t block, const void* writer, uint64_t epoch);
  // The epoch of the last write; 0 for none, or one that was waited for.
  uint64_t written_epoch(size_t block) const { return blocks_[block].written_epoch; }

  size_t mappings() const { return mappings_; }
  // The heap's memory is gone. Rule: nothing maps it.
  void forget_all();

 private:
  struct Block {
    size_t mappings = 0;
    bool blank = true;  // no writable mapping yet since the heap has memory
    bool sealed = false;
    const void* writer = nullptr;
    uint64_t written_epoch = 0;
  };

  std::vector<Block> blocks_;
  size_t mappings_ = 0;
};

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
  // True where the device gets the memory back before the substrate ends.
  virtual bool releases() const { return true; }

 private:
  const std::shared_ptr<Context> context_;
  std::mutex memory_;  // held while memory is made or let go of
  std::atomic<size_t> committed_{0};
  BlockLedger ledger_;
};

}  // namespace quire::metal
