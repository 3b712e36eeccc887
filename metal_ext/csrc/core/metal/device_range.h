#pragma once

#include <Metal/Metal.hpp>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/address_range.h"
#include "core/metal/context.h"
#include "core/metal/device_heap.h"

// Address ranges of a GPU: what is common to the sparse, paged and dense kinds of memory.
namespace quire::metal {

// The start of a region in one of a range's buffers, for MLX arrays that view the region.
struct BufferPlace {
  MTL::Buffer* buffer;
  uint64_t offset;
};

// Consecutive blocks of a heap that are mapped to consecutive blocks of a range.
struct Run {
  std::shared_ptr<DeviceHeap> heap;
  size_t heap_block;
  size_t block;
  size_t count;
  bool writable;
};

// The addresses of one sequence's K and V on a GPU, with the rules that hold for all kinds of
// memory. Subclasses map the blocks and locate the rows.
class DeviceRange : public AddressRange {
 public:
  explicit DeviceRange(std::shared_ptr<Context> context)
      : AddressRange(context->geometry),
        context_(std::move(context)),
        places_(geometry().blocks_per_range()) {}

  const std::shared_ptr<Context>& context() const { return context_; }

  // Records that a step reads tokens [0, start + count) and writes the last `count` of them. Throws
  // std::logic_error if a written block is sealed or a token is not mapped.
  void use(uint64_t epoch, size_t start, size_t count);
  // Copies the first `tokens` rows of a block, in every region, on the mapper's thread.
  void copy_from(DeviceRange& source, size_t source_block, size_t block, size_t tokens);
  // Class Bundle calls observe() when a run of blocks is mapped, or withdraw() to cancel it.
  void observe(const Run& run);
  void withdraw(const Run& run);
  // Unmaps everything, in order, when the backend shuts down.
  void unmap_all();
  // Releases the device objects of an unmapped range when the backend shuts down.
  virtual void drop() {}

  // --- The places of rows. On the wrong kind of range, a method throws std::logic_error ---
  virtual uint64_t row_base(size_t buffer) const = 0;  // RowEntry::base of the range's rows
  virtual BufferPlace view(size_t region) const;       // for arrays that view the region
  // Returns the GPU addresses of the first `blocks` blocks of a paged range.
  virtual std::vector<uint64_t> page_addresses(size_t blocks) const;

 protected:
  // The block of a heap that is mapped to a block of this range. If there is none, `heap` is null.
  struct Place {
    std::shared_ptr<DeviceHeap> heap;
    size_t block = 0;
    bool observed = false;  // whether the mapping is complete and the block filled
  };

  // attach() maps blocks, and fills writable ones with zeros. It returns false if Bundle does this
  // later, and then calls observe() or withdraw(). detach() unmaps blocks. copy() copies rows.
  virtual bool attach(const Run& run) = 0;
  virtual void detach(size_t block, size_t count) = 0;
  virtual void copy(DeviceRange& source, size_t source_block, size_t block, size_t tokens) = 0;

  // Moves a mapped block to or from a file: by the CPU, from its contents(), or as a subclass does.
  virtual uint32_t move_place(
      Direction direction, const Place& at, size_t block, const FilePlace& file);
  // Returns a region's bytes of a block for the CPU, or throws std::logic_error if there are none.
  virtual std::byte* contents(const Place& at, size_t region) const;

  bool map_memory(
      const std::shared_ptr<Heap>& heap, size_t heap_block, size_t block, size_t count,
      bool writable) final;
  void prepare_unmap() override;
  void commit_memory(size_t, size_t) final {}
  uint32_t move_memory(Direction direction, size_t block, const FilePlace& file) final;
  void unmap_memory(size_t block, size_t count) final;

  // Only the mapper's thread may call this without holding Context::books.
  const Place& place(size_t block) const { return places_[block]; }

 private:
  void note_use(uint64_t epoch, size_t start, size_t count);
  void enter(const Run& run);
  void leave(size_t block, size_t count);

  const std::shared_ptr<Context> context_;
  std::vector<Place> places_;
  uint64_t last_used_ = 0;  // the epoch of the newest step that may touch the range
  int64_t shift_ = 0;       // of that step's rows (MappedRun)
};

}  // namespace quire::metal
