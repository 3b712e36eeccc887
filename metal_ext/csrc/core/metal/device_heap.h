#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/heap.h"
#include "core/metal/context.h"

// Heaps of a GPU's memory, and the record of where a heap's blocks are mapped and written.
namespace quire::metal {

// Records the mappings of every block of one heap, and the one range that may write each block. The
// caller must hold Context::books. All methods throw std::logic_error if a rule is broken.
//   blank -- writable mapping --> owned -- read-only mapping, its writes complete --> sealed
// A sealed block is never written. A new writable mapping makes an unmapped block owned again.
class BlockLedger {
 public:
  explicit BlockLedger(size_t blocks) : blocks_(blocks) {}

  // Maps blocks that only the range `writer` may write. Rule: no block is mapped yet.
  void map_writable(size_t first, size_t count, const void* writer);
  // Maps blocks read-only, and seals them. Rule: the step that last wrote a block is complete.
  void map_read_only(size_t first, size_t count, uint64_t completed_epoch);
  void unmap(size_t block, const void* range);

  // Removes a mapping from the record after the device refused the heap's memory.
  void withdraw(size_t first, size_t count);

  // Rules: only a block's writer may write the block, and a sealed block is never written.
  void require_writable(size_t block, const void* writer) const;
  void write(size_t block, const void* writer, uint64_t epoch);
  // Returns the epoch (number) of the step that last wrote the block, or 0 if none did.
  uint64_t written_epoch(size_t block) const { return blocks_[block].written_epoch; }

  size_t mappings() const { return mappings_; }
  // Clears the record of all blocks after the heap's memory is gone. Rule: no block is mapped.
  void forget_all();

 private:
  struct Block {
    size_t mappings = 0;
    bool blank = true;  // nothing was mapped since the memory was made
    bool sealed = false;
    const void* writer = nullptr;
    uint64_t written_epoch = 0;
  };

  std::vector<Block> blocks_;
  size_t mappings_ = 0;
};

// Physical memory of a GPU, which is released as a whole, and allocated again when needed.
class DeviceHeap : public Heap {
 public:
  explicit DeviceHeap(std::shared_ptr<Context> context)
      : Heap(context->geometry),
        context_(std::move(context)),
        ledger_(geometry().blocks_per_heap()) {}

  size_t committed_bytes() const override { return committed_.load(); }
  bool releases_blocks() const override { return false; }

  // Allocates the memory if it is missing. Throws std::system_error(ENOMEM) if refused.
  void commit();
  // Releases the memory of an unmapped heap for good, when the backend shuts down.
  void drop();

  // The caller must hold Context::books while it uses the result.
  BlockLedger& ledger() { return ledger_; }
  const std::shared_ptr<Context>& context() const { return context_; }

 protected:
  // Rule: a heap is released only when no block is mapped and no step runs. If steps run, this
  // function waits for their end. If new steps begin all the time, the heap keeps its memory.
  void release_memory(size_t first, size_t count) override;

  // make() allocates memory, which Context::settle() later makes resident, or throws
  // std::system_error(ENOMEM). unmake() releases the memory.
  virtual void make() = 0;
  virtual void unmake() = 0;
  // Returns false if the memory stays allocated until the backend shuts down.
  virtual bool releases() const { return true; }

 private:
  const std::shared_ptr<Context> context_;
  std::mutex memory_;  // held while the heap's memory is made or released
  std::atomic<size_t> committed_{0};
  BlockLedger ledger_;
};

}  // namespace quire::metal
