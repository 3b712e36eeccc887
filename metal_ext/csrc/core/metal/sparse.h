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

namespace quire::metal {

// Where a region lies: sparse, in which of a sequence's buffers; paged, in an extent.
struct RegionPlace {
  size_t buffer;    // always 0 on paged and dense
  uint64_t offset;  // bytes from that buffer's, or the extent's, start
};

// Which of a sequence's sparse buffers each region lies in, where one would be longer than the
// device allows. Cut between layers: regions 2i and 2i + 1 (keys and values) stay together.
//
//   buffer 0: | region 0 | region 1 | region 2 | region 3 |   buffer 1: | region 4 | region 5 | ...
struct BufferPlan {
  // Throws std::runtime_error where one layer alone is too long.
  BufferPlan(const Geometry& geometry, size_t max_buffer_bytes);

  // Neighbours in one buffer whose rows have the same length, and which therefore lie one
  // `stride` apart: what one dispatch fills or copies.
  struct Run {
    size_t first_region;
    size_t regions;
    uint64_t stride;
  };

  std::vector<size_t> bytes;        // of each buffer
  std::vector<RegionPlace> places;  // of each region
  std::vector<Run> runs;
};

// A placement heap: pages that can stand behind sparse buffers, at several places at once.
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

// A sequence's addresses: one placement sparse buffer, or several where one would be too long.
class SparseBufferRange final : public DeviceRange {
 public:
  // Throws std::system_error(ENOMEM) where the device refuses.
  SparseBufferRange(std::shared_ptr<Context> context, std::shared_ptr<const BufferPlan> plan);

  std::byte* region(size_t index) const override;
  uint64_t row_base(size_t buffer) const override { return addresses_.at(buffer); }
  BufferPlace view(size_t region) const override;
  void drop() override;

  // For the bundle: hands the device the maps of a run, and adds what fills it with zeros.
  void begin_map(const Run& run);
  void add_zeros(const Run& run, std::vector<BlockArguments>& zeros) const;

 protected:
  bool attach(const Run& run) override;
  void detach(size_t block, size_t count) override;
  void copy(DeviceRange& source, size_t source_block, size_t block, size_t tokens) override;
  void prepare_unmap() override;

 private:
  // By buffer. One operation per region and run of blocks, because both sides are region-major.
  std::vector<std::vector<MappingOperation>> operations(
      MTL::SparseTextureMappingMode mode, size_t heap_block, size_t block, size_t count) const;

  const std::shared_ptr<const BufferPlan> plan_;
  std::vector<NS::SharedPtr<MTL::Buffer>> buffers_;
  std::vector<uint64_t> addresses_;  // of the buffers; they never move
};

// Maps of sparse buffers that are made together: however many there are, the CPU waits once until
// all are there, and once more until those that are fresh hold zeros.
//
//   map | signal | map | signal | ... | CPU waits | zeros of all | CPU waits | they count as mapped
//
// Mapper's thread. Before finish() the device knows of none of them. Where memory is mapped only
// while no step is in flight, none begins from the first add() until finish() has returned.
class Bundle {
 public:
  explicit Bundle(Context& context) : context_(context) {}

  // range: which the substrate keeps.
  void add(SparseBufferRange& range, const Run& run);
  bool has(const SparseBufferRange& range) const;
  // Throws std::runtime_error where the device fails: what is mapped is in doubt then.
  void finish();
  // None of them will be made. For the substrate's end.
  void withdraw();

 private:
  Context& context_;
  std::vector<std::pair<SparseBufferRange*, Run>> maps_;
  Epochs::Pause point_;
};

}  // namespace quire::metal
