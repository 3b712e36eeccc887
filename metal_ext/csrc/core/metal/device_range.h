#pragma once

#include <Metal/Metal.hpp>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/address_range.h"
#include "core/metal/context.h"
#include "core/metal/device_heap.h"

namespace quire::metal {

// A place in a buffer that MLX may view.
struct BufferPlace {
  MTL::Buffer* buffer;
  uint64_t offset;
};

// A run of a heap's blocks, mapped to consecutive blocks of a range.
struct Run {
  std::shared_ptr<DeviceHeap> heap;
  size_t heap_block;
  size_t block;
  size_t count;
  bool writable;
};

// One sequence's addresses on the device, with the rules that all kinds share. Subclasses say how
// blocks are mapped and where rows lie.
class DeviceRange : public AddressRange {
 public:
  explicit DeviceRange(std::shared_ptr<Context> context)
      : AddressRange(context->geometry),
        context_(std::move(context)),
        places_(geometry().blocks_per_range()) {}

  const std::shared_ptr<Context>& context() const { return context_; }

  // Notes that the step `epoch` reads tokens [0, start + count) and writes the last `count`. Throws
  // std::logic_error for a write to a sealed block or a use of unmapped tokens.
  void use(uint64_t epoch, size_t start, size_t count);
  // Copies the first `tokens` rows of a source block in every region. Mapper's thread.
  void copy_from(DeviceRange& source, size_t source_block, size_t block, size_t tokens);
  // For the bundle: observe() counts the run as mapped from now on, withdraw() drops it.
  void observe(const Run& run);
  void withdraw(const Run& run);
  // For the substrate's end: unmaps everything, in order.
  void unmap_all();
  // For the substrate's end: releases the device objects of an unmapped range.
  virtual void drop() {}

  // --- Places of rows: a method throws std::logic_error on the wrong kind of range ---
  virtual uint64_t row_base(size_t buffer) const = 0;  // RowEntry::base of the range's rows
  virtual BufferPlace view(size_t region) const;       // for arrays that view the region
  // Paged: the GPU addresses of the leading mapped blocks, for LayerPlace.
  virtual std::vector<uint64_t> page_addresses(size_t blocks) const;

 protected:
  // The heap block behind a block of the range; no heap: unmapped.
  struct Place {
    std::shared_ptr<DeviceHeap> heap;
    size_t block = 0;
    bool observed = false;  // whether the mapping is complete and the block filled
  };

  // attach() maps blocks and zeroes writable ones. It returns false to leave that to the bundle,
  // which later calls observe() or withdraw(). detach() unmaps blocks. copy() copies rows.
  virtual bool attach(const Run& run) = 0;
  virtual void detach(size_t block, size_t count) = 0;
  virtual void copy(DeviceRange& source, size_t source_block, size_t block, size_t tokens) = 0;
  virtual void check_writable(bool) const {}

  bool map_memory(
      const std::shared_ptr<Heap>& heap, size_t heap_block, size_t block, size_t count,
      bool writable) final;
  void prepare_unmap() override;
  // map() has already committed and filled the memory.
  void commit_memory(size_t, size_t) final {}
  void unmap_memory(size_t block, size_t count) final;

  // Written under Context::books; read under it, or on the mapper's thread.
  const Place& place(size_t block) const { return places_[block]; }

 private:
  void wait_for(uint64_t epoch, const char* what) const;
  void note_use(uint64_t epoch, size_t start, size_t count);
  void enter(const Run& run);
  void leave(size_t block, size_t count);

  const std::shared_ptr<Context> context_;
  std::vector<Place> places_;
  uint64_t last_used_ = 0;  // the newest epoch that may touch the range
};

}  // namespace quire::metal
