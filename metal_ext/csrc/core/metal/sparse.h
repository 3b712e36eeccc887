#pragma once

#include <Metal/Metal.hpp>

#include <memory>
#include <vector>

#include "core/metal/buffer_plan.h"
#include "core/metal/device_range.h"

namespace quire::metal {

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

}  // namespace quire::metal
