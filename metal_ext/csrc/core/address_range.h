#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/geometry.h"
#include "core/heap.h"

namespace quire {

// One sequence's contiguous addresses. Kernels take a region's address and never look at blocks;
// which blocks have memory behind them is kept here only so that a row without memory is refused
// before a kernel touches it.
class AddressRange {
 public:
  explicit AddressRange(const Geometry& geometry)
      : geometry_(geometry), access_(geometry.blocks_per_range(), Access::none) {}
  virtual ~AddressRange() = default;
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  const Geometry& geometry() const { return geometry_; }
  // Where a region begins, as the processor that runs the kernels addresses it. Null where nothing
  // is attached to a range whose memory is its heap's.
  virtual std::byte* region(size_t index) const = 0;

  // Puts blocks [heap_block, + count) of the heap behind blocks [block, + count) of this range.
  // Where they are not writable, a write is SIGSEGV. Throws std::system_error when the system has
  // no mapping left (nothing is changed then), std::logic_error when a block is mapped already, and
  // std::runtime_error when a refused map cannot be undone: what is mapped is in doubt then.
  void map(
      const std::shared_ptr<Heap>& heap, int64_t heap_block, int64_t block, int64_t count,
      bool writable);
  // The same, writable, and commits the memory as far as the system gives it, so that the first
  // write takes no page fault. What map() changes is seen before the memory is there.
  void map_committed(
      const std::shared_ptr<Heap>& heap, int64_t heap_block, int64_t block, int64_t count);
  // The checks that map() makes first. Refuses runs that do not lie inside the range and the heap,
  // and a heap of another geometry.
  void check_map(const Heap& heap, int64_t heap_block, int64_t block, int64_t count) const;
  // Takes the memory away from [block, + count). Throws std::logic_error when one has none.
  void unmap(int64_t block, int64_t count);

  // Tokens of the leading blocks that have memory: rows below this may be read, and written where
  // no block is read-only.
  size_t mapped_tokens() const;
  // The first read-only block of those that hold tokens [start, start + count), count > 0.
  std::optional<size_t> first_read_only(size_t start, size_t count) const;

 protected:
  // True where the blocks count as mapped from when it returns; else count_mapped() comes later.
  virtual bool map_memory(
      const std::shared_ptr<Heap>& heap, size_t heap_block, size_t block, size_t count,
      bool writable) = 0;
  virtual void commit_memory(size_t block, size_t count) = 0;
  virtual void unmap_memory(size_t block, size_t count) = 0;
  // Before blocks are unmapped, with nothing changed where it throws: those that were to count
  // later do so when it returns.
  virtual void prepare_unmap() {}
  void count_mapped(size_t block, size_t count, bool writable) {
    set(block, count, writable ? Access::writable : Access::read_only);
  }

 private:
  enum class Access : uint8_t { none, read_only, writable };

  void require(size_t block, size_t count, bool mapped) const;
  void set(size_t block, size_t count, Access access);

  const Geometry geometry_;
  // The engine and the mapper's thread both map and unmap. One at a time holds changing_ through
  // its system calls. The state of the blocks has a mutex of its own, so that its readers never
  // wait for system calls.
  std::mutex changing_;
  mutable std::mutex mutex_;  // guards what follows
  std::vector<Access> access_;
  size_t mapped_prefix_ = 0;
};

// A range in this process's own addresses, one region after the other from base() on.
//
// One readable page lies below base(): MLX's CPU allocator keeps a buffer's size in the eight bytes
// before it, and views made of this range must look like its buffers.
class HostRange : public AddressRange {
 public:
  using AddressRange::AddressRange;
  // Null only for a dense range to which no heap is attached.
  virtual std::byte* base() const = 0;
  std::byte* region(size_t index) const override {
    std::byte* const first = base();
    return first == nullptr ? nullptr : first + geometry().range_region_offset(index);
  }
};

// Addresses are reserved once; blocks of any heap are mapped behind them.
class SparseRange final : public HostRange {
 public:
  explicit SparseRange(const Geometry& geometry);
  ~SparseRange() override;
  std::byte* base() const override { return base_; }

 protected:
  bool map_memory(
      const std::shared_ptr<Heap>& heap, size_t heap_block, size_t block, size_t count,
      bool writable) override;
  void commit_memory(size_t block, size_t count) override;
  void unmap_memory(size_t block, size_t count) override;

 private:
  // Takes the memory away from [first, first + bytes), even where the system refuses mappings.
  // Throws std::runtime_error when even that fails.
  void clear(std::byte* first, size_t bytes);

  std::byte* const base_;
  bool spare_ = true;  // touched only under changing_
};

// One block that is the whole context: the heap's own memory is the range.
class DenseRange final : public HostRange {
 public:
  explicit DenseRange(const Geometry& geometry);
  std::byte* base() const override;

 protected:
  bool map_memory(
      const std::shared_ptr<Heap>& heap, size_t heap_block, size_t block, size_t count,
      bool writable) override;
  void commit_memory(size_t, size_t) override {}  // it is committed when it is mapped
  void unmap_memory(size_t block, size_t count) override;

 private:
  std::shared_ptr<Heap> heap_;
};

}  // namespace quire
