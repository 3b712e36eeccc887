#pragma once

#include <Metal/Metal.hpp>

#include <memory>
#include <vector>

#include "core/metal/device_range.h"

namespace quire::metal {

// An extent: an ordinary buffer, which the CPU reaches too.
class ExtentHeap final : public DeviceHeap {
 public:
  explicit ExtentHeap(std::shared_ptr<Context> context) : DeviceHeap(std::move(context)) {}

  // Of a block of region 0; region r lies heap_region_offset(r) behind it.
  uint64_t block_address(size_t block) const;
  // The same memory for the CPU, of a block of any region.
  std::byte* contents(size_t region, size_t block) const;

 protected:
  void make() override;
  void unmake() override;

 private:
  NS::SharedPtr<MTL::Buffer> buffer_;
};

// A sequence's addresses as a table: the GPU address of every block. Nothing is mapped on the
// device, so that it works wherever buffers have addresses.
class PagedRange final : public DeviceRange {
 public:
  explicit PagedRange(std::shared_ptr<Context> context) : DeviceRange(std::move(context)) {}

  std::byte* region(size_t) const override { return nullptr; }  // regions are not contiguous
  uint64_t row_base(size_t) const override { return 0; }
  std::vector<uint64_t> page_addresses(size_t blocks) const override;

 protected:
  bool attach(const Run& run) override;      // the record is the page table
  void detach(size_t, size_t) override {}
  void copy(DeviceRange& source, size_t source_block, size_t block, size_t tokens) override;

 private:
  std::byte* contents(size_t region, size_t block) const;
};

// Throws std::invalid_argument where regions have rows of different lengths: one address per block
// could not serve them all.
void require_equal_rows(const Geometry& geometry);

}  // namespace quire::metal
