#pragma once

#include <Metal/Metal.hpp>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/address_range.h"
#include "core/metal/context.h"
#include "core/metal/device_heap.h"

namespace quire::metal {

// A buffer that MLX may view, and where in it something begins.
struct BufferPlace {
  MTL::Buffer* buffer;
  uint64_t offset;
};

// Blocks of a heap that are to stand behind blocks of a range.
struct Run {
  std::shared_ptr<DeviceHeap> heap;
  size_t heap_block;
  size_t block;
  size_t count;
  bool writable;
};

// One sequence's addresses on the device, with the rules that hold for every kind. The kinds say
// how blocks get behind addresses, and where rows are found.
class DeviceRange : public AddressRange {
 public:
  explicit DeviceRange(std::shared_ptr<Context> context)
      : AddressRange(context->geometry),
        context_(std::move(context)),
        places_(geometry().blocks_per_range()) {}

  const std::shared_ptr<Context>& context() const { return context_; }

  // A step that started as `epoch` reads tokens [0, start + count) and writes the last `count`.
  // Throws std::logic_error where that would write a sealed block, or use tokens whose mapping was
  // not observed, and std::runtime_error after a failure.
  void use(uint64_t epoch, size_t start, size_t count);
  // The first `tokens` rows of a block of the source, in every region. Mapper's thread.
  void copy_from(DeviceRange& source, size_t source_block, size_t block, size_t tokens);
  // For the bundle: the run is there, and counts as mapped from now on; or never will be.
  void observe(const Run& run);
  void withdraw(const Run& run);
  // All that is mapped, in order. For the substrate's end.
  void unmap_all();
  // Lets go of device objects, for good. For the substrate's end, when nothing is mapped.
  virtual void drop() {}

  // --- where rows are found: what does not apply to a kind throws std::logic_error ---------------
  virtual uint64_t row_base(size_t buffer) const = 0;  // RowEntry::base of the range's rows
  virtual BufferPlace view(size_t region) const;       // for arrays that view the region
  // Paged: GPU addresses of the leading mapped blocks, each as LayerPlace wants it.
  virtual std::vector<uint64_t> page_addresses(size_t blocks) const;

 protected:
  // Which block of which heap stands behind a block of the range; no heap where none does.
  struct Place {
    std::shared_ptr<DeviceHeap> heap;
    size_t block = 0;
    bool observed = false;  // and it holds zeros, or what it is shared for
  };

  // attach: puts blocks of a heap behind the range's, and fills writable ones with zeros; false
  // where that is left to the bundle, which says observe() or withdraw(). detach: takes them away.
  // copy: rows between attached blocks.
  virtual bool attach(const Run& run) = 0;
  virtual void detach(size_t block, size_t count) = 0;
  virtual void copy(DeviceRange& source, size_t source_block, size_t block, size_t tokens) = 0;
  virtual void check_writable(bool) const {}

  bool map_memory(
      const std::shared_ptr<Heap>& heap, size_t heap_block, size_t block, size_t count,
      bool writable) final;
  void prepare_unmap() override;
  // Memory is there and filled when map() returns.
  void commit_memory(size_t, size_t) final {}
  void unmap_memory(size_t block, size_t count) final;

  // Written under Context::books; read under it, or on the thread that maps.
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
