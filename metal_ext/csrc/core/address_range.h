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

// The contiguous addresses of one sequence's K and V, with memory mapped block by block. Kernels
// see only the address of a region, which is one layer's K or V. The range knows which blocks are
// mapped, so that rows (tokens) without memory are refused before a kernel runs.
class AddressRange {
 public:
  explicit AddressRange(const Geometry& geometry)
      : geometry_(geometry), access_(geometry.blocks_per_range(), Access::none) {}
  virtual ~AddressRange() = default;
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  const Geometry& geometry() const { return geometry_; }
  // Returns a region's address for the processor that runs the kernels, or null for a dense range
  // to which no heap is mapped.
  virtual std::byte* region(size_t index) const = 0;

  // Maps blocks [heap_block, + count) of the heap to blocks [block, + count) of this range. Throws
  // std::system_error, with nothing changed, when the system has no mapping left; std::logic_error
  // for a block that is already mapped; std::runtime_error when a half-made mapping cannot be
  // undone.
  void map(
      const std::shared_ptr<Heap>& heap, int64_t heap_block, int64_t block, int64_t count,
      bool writable);
  // Maps writable blocks and tries to commit their memory, so that the first write needs no page
  // fault.
  void map_committed(
      const std::shared_ptr<Heap>& heap, int64_t heap_block, int64_t block, int64_t count);
  // Checks that the blocks lie inside the range and the heap, and that both geometries agree.
  void check_map(const Heap& heap, int64_t heap_block, int64_t block, int64_t count) const;
  // Throws std::logic_error when a block of [block, + count) is not mapped.
  void unmap(int64_t block, int64_t count);

  // Returns the number of tokens in the mapped blocks before the first unmapped one.
  size_t mapped_tokens() const;
  // Returns the first read-only block with any of tokens [start, start + count), count > 0.
  std::optional<size_t> first_read_only(size_t start, size_t count) const;

 protected:
  // Returns false if the blocks do not count as mapped before a later call of count_mapped().
  virtual bool map_memory(
      const std::shared_ptr<Heap>& heap, size_t heap_block, size_t block, size_t count,
      bool writable) = 0;
  virtual void commit_memory(size_t block, size_t count) = 0;
  virtual void unmap_memory(size_t block, size_t count) = 0;
  // Finishes all mappings that wait for count_mapped(). If this throws, nothing has changed.
  virtual void prepare_unmap() {}
  void count_mapped(size_t block, size_t count, bool writable) {
    set(block, count, writable ? Access::writable : Access::read_only);
  }

 private:
  enum class Access : uint8_t { none, read_only, writable };

  void require(size_t block, size_t count, bool mapped) const;
  void set(size_t block, size_t count, Access access);

  const Geometry geometry_;
  // changing_ is held during system calls; mutex_ never is, so that readers do not wait for the
  // system.
  std::mutex changing_;
  mutable std::mutex mutex_;  // guards the members below
  std::vector<Access> access_;
  size_t mapped_prefix_ = 0;
};

// A range in this process's addresses. The eight bytes below base() hold the range's size. MLX's
// CPU allocator does the same with its buffers, so MLX can view a range as a buffer.
class HostRange : public AddressRange {
 public:
  using AddressRange::AddressRange;
  // Returns null only for a dense range to which no heap is mapped.
  virtual std::byte* base() const = 0;
  std::byte* region(size_t index) const override {
    std::byte* const first = base();
    return first == nullptr ? nullptr : first + geometry().range_region_offset(index);
  }
};

// A range of reserved addresses, to which blocks of any heap in shared memory are mapped.
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
  // Unmaps [first, first + bytes), even when the system has no mapping left.
  void clear(std::byte* first, size_t bytes);

  std::byte* const base_;
  bool spare_ = true;  // whether the spare page (posix_memory.h) is mapped
};

// A range of one block, which holds the whole context, at the mapped heap's own addresses.
class DenseRange final : public HostRange {
 public:
  explicit DenseRange(const Geometry& geometry);
  std::byte* base() const override;

 protected:
  bool map_memory(
      const std::shared_ptr<Heap>& heap, size_t heap_block, size_t block, size_t count,
      bool writable) override;
  void commit_memory(size_t, size_t) override {}  // map_memory() has committed the memory
  void unmap_memory(size_t block, size_t count) override;

 private:
  std::shared_ptr<Heap> heap_;
};

}  // namespace quire
