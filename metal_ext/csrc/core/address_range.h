#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/geometry.h"
#include "core/heap.h"

namespace quire {

// One sequence's contiguous addresses. Kernels take base() plus a region's offset and never look at
// blocks; which blocks have memory behind them is kept here only so that a row without memory is
// refused before a kernel touches it.
//
// One readable page lies below base(): MLX's CPU allocator keeps a buffer's size in the eight bytes
// before it, and views made of this range must look like its buffers.
class AddressRange {
 public:
  explicit AddressRange(const Geometry& geometry)
      : geometry_(geometry), mapped_(geometry.blocks_per_range(), false) {}
  virtual ~AddressRange() = default;
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  const Geometry& geometry() const { return geometry_; }
  // Null only for a dense range to which no heap is attached.
  virtual std::byte* base() const = 0;
  std::byte* region(size_t index) const { return base() + geometry_.range_region_offset(index); }

  // Puts blocks [heap_block, + count) of the heap behind blocks [block, + count) of this range.
  // Throws std::system_error when the system has no mapping left (nothing is changed then), and
  // std::logic_error when a block is mapped already.
  void map(const std::shared_ptr<Heap>& heap, int64_t heap_block, int64_t block, int64_t count);
  // Takes the memory away from [block, + count). Throws std::logic_error when one has none.
  void unmap(int64_t block, int64_t count);

  // Tokens of the leading blocks that have memory: rows below this may be read and written.
  size_t mapped_tokens() const;

 protected:
  virtual void map_memory(
      const std::shared_ptr<Heap>& heap, size_t heap_block, size_t block, size_t count) = 0;
  virtual void unmap_memory(size_t block, size_t count) = 0;

 private:
  void require(size_t block, size_t count, bool mapped) const;

  const Geometry geometry_;
  mutable std::mutex mutex_;  // the engine maps, the mapper thread unmaps
  std::vector<bool> mapped_;
  size_t mapped_prefix_ = 0;
};

// Addresses are reserved once; blocks of any heap are mapped behind them.
class SparseRange final : public AddressRange {
 public:
  explicit SparseRange(const Geometry& geometry);
  ~SparseRange() override;
  std::byte* base() const override { return base_; }

 protected:
  void map_memory(
      const std::shared_ptr<Heap>& heap, size_t heap_block, size_t block, size_t count) override;
  void unmap_memory(size_t block, size_t count) override;

 private:
  // Takes the memory away from [first, first + bytes), even where the system refuses mappings.
  void clear(std::byte* first, size_t bytes);

  std::byte* const base_;
  bool spare_ = true;  // guarded by the range's mutex
};

// One block that is the whole context: the heap's own memory is the range.
class DenseRange final : public AddressRange {
 public:
  explicit DenseRange(const Geometry& geometry);
  std::byte* base() const override;

 protected:
  void map_memory(
      const std::shared_ptr<Heap>& heap, size_t heap_block, size_t block, size_t count) override;
  void unmap_memory(size_t block, size_t count) override;

 private:
  std::shared_ptr<Heap> heap_;
};

}  // namespace quire
