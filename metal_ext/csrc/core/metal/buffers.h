#pragma once

#include <Metal/Metal.hpp>

#include <memory>
#include <vector>

#include "core/metal/device_range.h"

// Two kinds of GPU memory that need no mappings. Paged: kernels read a table of block addresses.
// Dense: each sequence has a slice of one buffer.
namespace quire::metal {

// A heap of the paged kind: an ordinary buffer, which the CPU can access as well.
class ExtentHeap final : public DeviceHeap {
 public:
  explicit ExtentHeap(std::shared_ptr<Context> context) : DeviceHeap(std::move(context)) {}

  // Returns a block's address in region 0. In region r it is heap_region_offset(r) bytes higher.
  uint64_t block_address(size_t block) const;
  std::byte* contents(size_t region, size_t block) const;

 protected:
  void make() override;
  void unmake() override;

 private:
  NS::SharedPtr<MTL::Buffer> buffer_;
};

// A sequence's page table: the GPU address of each block. Nothing is mapped on the device.
class PagedRange final : public DeviceRange {
 public:
  explicit PagedRange(std::shared_ptr<Context> context) : DeviceRange(std::move(context)) {}

  std::byte* region(size_t) const override { return nullptr; }  // a region is not contiguous
  uint64_t row_base(size_t) const override { return 0; }
  std::vector<uint64_t> page_addresses(size_t blocks) const override;

 protected:
  bool attach(const Run& run) override;      // the record of DeviceRange suffices
  void detach(size_t, size_t) override {}
  void copy(DeviceRange& source, size_t source_block, size_t block, size_t tokens) override;
  std::byte* contents(const Place& at, size_t region) const override;
};

void require_equal_rows(const Geometry& geometry);

// The memory of the dense kind: one ordinary buffer, with a slice for each sequence.
class Arena {
 public:
  // Throws std::runtime_error if the slices need more than max_buffer_bytes, and
  // std::system_error(ENOMEM) if the device refuses the buffer.
  Arena(Context& context, size_t slices, size_t max_buffer_bytes);

  MTL::Buffer* buffer() const { return buffer_.get(); }
  size_t slices() const { return slices_; }
  void drop() { buffer_.reset(); }

 private:
  const size_t slices_;
  NS::SharedPtr<MTL::Buffer> buffer_;
};

// One sequence's slice of the buffer in Arena, for a whole context. It is never released.
class ArenaHeap final : public DeviceHeap {
 public:
  ArenaHeap(std::shared_ptr<Context> context, std::shared_ptr<Arena> arena, size_t slice)
      : DeviceHeap(std::move(context)), arena_(std::move(arena)), slice_(slice) {}

  uint64_t offset() const { return slice_ * geometry().heap_bytes(); }
  std::byte* contents() const {
    return static_cast<std::byte*>(arena_->buffer()->contents()) + offset();
  }

 protected:
  void make() override {}  // the arena exists already
  void unmake() override {}
  bool releases() const override { return false; }

 private:
  const std::shared_ptr<Arena> arena_;
  const size_t slice_;
};

// A range of the dense kind. The block for a whole context lies in a slice of Arena's buffer.
class ArenaRange final : public DeviceRange {
 public:
  ArenaRange(std::shared_ptr<Context> context, std::shared_ptr<Arena> arena)
      : DeviceRange(std::move(context)), arena_(std::move(arena)) {}

  // Returns a region's address for the CPU, or null if no slice is mapped.
  std::byte* region(size_t index) const override;
  // Returns the mapped slice's offset in Arena's buffer. Throws std::logic_error without a slice.
  uint64_t row_base(size_t buffer) const override;
  BufferPlace view(size_t region) const override;

 protected:
  bool attach(const Run& run) override;
  void detach(size_t, size_t) override {}
  void copy(DeviceRange& source, size_t source_block, size_t block, size_t tokens) override;
  std::byte* contents(const Place& at, size_t region) const override;

 private:
  std::shared_ptr<DeviceHeap> slice() const;

  const std::shared_ptr<Arena> arena_;
};

}  // namespace quire::metal
