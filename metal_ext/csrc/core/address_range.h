#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/geometry.h"
#include "core/heap.h"
#include "core/records.h"

namespace quire {

// The contiguous addresses of one sequence's K and V. Memory is mapped there block by block. A
// region is the K or V of one layer. Uses of unmapped tokens can be refused before a kernel runs,
// because the range records which blocks are mapped.
class AddressRange {
 public:
  explicit AddressRange(const Geometry& geometry)
      : geometry_(geometry),
        access_(geometry.blocks_per_range(), Access::none),
        slots_(geometry.ring_blocks() > 0 ? geometry.blocks_per_range() : 0, kNoSlot) {}
  virtual ~AddressRange() = default;
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  const Geometry& geometry() const { return geometry_; }
  // Returns a region's address for the processor that runs the kernels, or null for a dense range
  // to which no heap is mapped.
  virtual std::byte* region(size_t index) const = 0;

  // Maps blocks [heap_block, + count) of the heap to blocks [block, + count) of this range. Throws
  // std::system_error and changes nothing if the system allows no more mappings. Throws
  // std::logic_error if a block is mapped already, std::runtime_error if a failed call cannot be
  // undone.
  void map(
      const std::shared_ptr<Heap>& heap, int64_t heap_block, int64_t block, int64_t count,
      bool writable);
  // Maps blocks writable and tries to commit their memory, so that first writes take no page fault.
  void map_committed(
      const std::shared_ptr<Heap>& heap, int64_t heap_block, int64_t block, int64_t count);
  // Checks that the blocks lie inside the range and the heap, and that both geometries are equal.
  void check_map(const Heap& heap, int64_t heap_block, int64_t block, int64_t count) const;
  // Throws std::logic_error if a block of [block, block + count) is not mapped.
  void unmap(int64_t block, int64_t count);
  // Moves a mapped block's bytes, region by region, to or from a file, on any thread. Returns their
  // CRC-32C. The block must not be unmapped or used meanwhile. Throws std::out_of_range for a block
  // or an offset out of bounds, std::logic_error if the block is not mapped, or not writable where
  // it is read from a file, and std::system_error as move_record() does.
  uint32_t move_block(Direction direction, int64_t block, int64_t fd, int64_t offset);
  // Returns the slot of a mapped block in each region. Blocks of one run have consecutive slots.
  size_t slot(size_t block) const { return slots_.empty() ? block : slots_[block]; }

  // Returns the number of tokens in the mapped blocks before the first unmapped block.
  size_t mapped_tokens() const;
  // Returns the tokens of the mapped blocks around a token, [first, end). If the token's own block
  // is unmapped, both are mapped_tokens(). The row of the run's token t is number t + shift in a
  // region's addresses.
  struct MappedRun {
    size_t first;
    size_t end;
    int64_t shift;
  };
  MappedRun mapped_run(size_t token) const;
  // Returns the first read-only block that has a token of [start, start + count). Rule: count > 0.
  std::optional<size_t> first_read_only(size_t start, size_t count) const;

 protected:
  // Blocks [skipped, + count) of some consecutive blocks, which are mapped at slots from `slot` on.
  struct SlotRun {
    size_t skipped;
    size_t slot;
    size_t count;
  };
  // Returns all places of consecutive blocks: one run, or with a ring the first run and its mirror.
  std::vector<SlotRun> slot_runs(size_t block, size_t count) const;

  // Maps memory for map(). Returns false if the subclass itself calls count_mapped() later.
  virtual bool map_memory(
      const std::shared_ptr<Heap>& heap, size_t heap_block, size_t block, size_t count,
      bool writable) = 0;
  virtual void commit_memory(size_t block, size_t count) = 0;
  virtual void unmap_memory(size_t block, size_t count) = 0;
  virtual uint32_t move_memory(Direction direction, size_t block, const FilePlace& place) = 0;
  // Finishes mappings that count_mapped() has not counted yet. If this throws, nothing changed.
  virtual void prepare_unmap() {}
  void count_mapped(size_t block, size_t count, bool writable) {
    set(block, count, writable ? Access::writable : Access::read_only);
  }

 private:
  enum class Access : uint8_t { none, read_only, writable };

  static constexpr uint32_t kNoSlot = UINT32_MAX;

  void check_each(size_t block, size_t count, bool mapped) const;
  // Gives blocks of a ring the slots behind the last mapped block's. Throws std::logic_error if
  // these do not suffice, or if a later block is mapped, and gives none.
  void take_slots(size_t block, size_t count);
  void free_slots(size_t block, size_t count);
  void set(size_t block, size_t count, Access access);

  const Geometry geometry_;
  // changing_ is held during system calls. mutex_ is not, so that readers need not wait.
  std::mutex changing_;
  mutable std::mutex mutex_;  // guards the members below
  std::vector<Access> access_;
  size_t mapped_prefix_ = 0;
  std::vector<uint32_t> slots_;  // by block, of a ring only
};

// The rules of dense ranges, on a CPU and on a GPU. They throw std::invalid_argument.
void require_one_block(const Geometry& geometry);
void require_dense_writable(bool writable);

// A range at addresses of this process. The eight bytes before base() hold the range's size, as in
// buffers of MLX's CPU allocator, so that MLX can view a range as a buffer.
class HostRange : public AddressRange {
 public:
  using AddressRange::AddressRange;
  // Returns null only for a dense range to which no heap is mapped.
  virtual std::byte* base() const = 0;
  std::byte* region(size_t index) const override {
    std::byte* const first = base();
    return first == nullptr ? nullptr : first + geometry().range_region_offset(index);
  }

 protected:
  uint32_t move_memory(Direction direction, size_t block, const FilePlace& place) override;
};

// A range of reserved addresses, at which blocks of heaps in shared memory are mapped.
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
  // Unmaps these bytes. A split mapping counts twice: at the system's limit, gives up spare_.
  void clear(std::byte* first, size_t bytes);

  std::byte* const base_;
  bool spare_ = true;  // whether the spare page (posix_memory.h) is mapped
};

// A range of one block for a whole context, at the addresses of the mapped heap.
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
