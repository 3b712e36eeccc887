#pragma once

#include <Metal/Metal.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/geometry.h"
#include "core/metal/device_range.h"
#include "core/metal/epochs.h"

// Sparse GPU memory: placement heaps, sparse buffers, and mappings that are made in batches.
namespace quire::metal {

// The place of a region (one layer's K or V) in a sequence's buffers, or in a paged heap.
struct RegionPlace {
  size_t buffer;    // always 0 on paged and dense
  uint64_t offset;  // bytes from the start of the buffer or heap
};

// Divides a sequence's regions among sparse buffers of a length that the device allows. Regions 2i
// and 2i + 1, which are a layer's keys and values, stay in one buffer.
//   buffer 0: | region 0 | region 1 | region 2 | region 3 |   buffer 1: | region 4 | region 5 | ...
struct BufferPlan {
  // Throws std::runtime_error if one layer alone does not fit into a buffer.
  BufferPlan(const Geometry& geometry, size_t max_buffer_bytes);

  // Adjacent regions of one buffer whose rows have the same length. The regions lie `stride` bytes
  // apart, so that one dispatch of a kernel fills or copies them all.
  struct Run {
    size_t first_region;
    size_t regions;
    uint64_t stride;
  };

  std::vector<size_t> bytes;        // length of each buffer
  std::vector<RegionPlace> places;  // place of each region
  std::vector<Run> runs;
};

// A placement heap. Its pages may be mapped in several sparse buffers at once.
class PlacementHeap final : public DeviceHeap {
 public:
  explicit PlacementHeap(std::shared_ptr<Context> context) : DeviceHeap(std::move(context)) {}
  MTL::Heap* heap() const { return heap_.get(); }

 protected:
  void make() override;
  void unmake() override;

 private:
  NS::SharedPtr<MTL::Heap> heap_;
};

// The addresses of one sequence's K and V: a placement sparse buffer, or several shorter ones.
class SparseBufferRange final : public DeviceRange {
 public:
  SparseBufferRange(std::shared_ptr<Context> context, std::shared_ptr<const BufferPlan> plan);

  std::byte* region(size_t index) const override;
  uint64_t row_base(size_t buffer) const override { return addresses_.at(buffer); }
  BufferPlace view(size_t region) const override;
  void drop() override;

  // Bundle calls begin_map() to send a run's mappings to the device, and add_zeros() to add the
  // commands that fill the run with zeros.
  void begin_map(const Run& run);
  void add_zeros(const Run& run, std::vector<BlockArguments>& zeros) const;

 protected:
  bool attach(const Run& run) override;
  void detach(size_t block, size_t count) override;
  void copy(DeviceRange& source, size_t source_block, size_t block, size_t tokens) override;
  void prepare_unmap() override;
  uint32_t move_place(
      Direction direction, const Place& at, size_t block, const FilePlace& file) override;

 private:
  uint64_t address(size_t region_index, size_t block) const;  // on the GPU
  // Returns a list of mapping operations for each buffer. One operation is for all blocks of a
  // region, because these blocks are adjacent both in heaps and in ranges. A ring's mirror has more
  // operations.
  std::vector<std::vector<MappingOperation>> operations(
      MTL::SparseTextureMappingMode mode, size_t heap_block, size_t block, size_t count) const;

  const std::shared_ptr<const BufferPlan> plan_;
  std::vector<NS::SharedPtr<MTL::Buffer>> buffers_;
  std::vector<uint64_t> addresses_;  // addresses of buffers_, which never move
};

// Maps blocks of several sparse buffers, with one wait for all mappings and one for all zeros:
//   map | signal | map | signal | ... | CPU waits | zeros of all | CPU waits | blocks are mapped
// The mapper's thread calls add() for each mapping, and then finish() to make them all. If memory
// is mapped only between steps, no step begins from the first add() until finish() returns.
class Bundle {
 public:
  explicit Bundle(Context& context) : context_(context) {}

  void add(SparseBufferRange& range, const Run& run);
  bool has(const SparseBufferRange& range) const;
  // Makes the added mappings. Throws std::runtime_error if the device fails.
  void finish();
  // Drops the added mappings, when the backend shuts down.
  void withdraw();

 private:
  Context& context_;
  std::vector<std::pair<SparseBufferRange*, Run>> maps_;
  Epochs::Pause point_;
};

}  // namespace quire::metal
