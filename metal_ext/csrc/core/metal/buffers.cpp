#include "core/metal/buffers.h"

#include <cstring>
#include <stdexcept>
#include <string>

// Implements two kinds of GPU memory that need no mappings: paged and dense.
namespace quire::metal {

void require_equal_rows(const Geometry& geometry) {
  for (size_t region = 1; region < geometry.regions(); ++region) {
    if (geometry.row_bytes(region) != geometry.row_bytes(0)) {
      throw std::invalid_argument(
          "the paged backend needs rows of one length, but region 0 has " +
          std::to_string(geometry.row_bytes(0)) + " bytes per row and region " +
          std::to_string(region) + " has " + std::to_string(geometry.row_bytes(region)));
    }
  }
}

void ExtentHeap::make() {
  buffer_ = make_shared_buffer(context()->device.get(), geometry().heap_bytes());
  context()->residency.add(buffer_.get(), geometry().heap_bytes());
}

void ExtentHeap::unmake() {
  context()->residency.remove(buffer_.get());
  buffer_.reset();
}

uint64_t ExtentHeap::block_address(size_t block) const {
  return buffer_->gpuAddress() + block * geometry().region_block_bytes(0);
}

std::byte* ExtentHeap::contents(size_t region, size_t block) const {
  return static_cast<std::byte*>(buffer_->contents()) + geometry().heap_region_offset(region) +
         block * geometry().region_block_bytes(region);
}

std::byte* PagedRange::contents(size_t region, size_t block) const {
  const Place& at = place(block);
  return static_cast<const ExtentHeap&>(*at.heap).contents(region, at.block);
}

bool PagedRange::attach(const Run& run) {
  for (size_t region = 0; run.writable && region < geometry().regions(); ++region) {
    // The blocks of a run are adjacent in memory, because they lie in one heap.
    std::memset(contents(region, run.block), 0, run.count * geometry().region_block_bytes(region));
  }
  return true;
}

void PagedRange::copy(DeviceRange& source, size_t source_block, size_t block, size_t tokens) {
  const auto& from = static_cast<const PagedRange&>(source);
  for (size_t region = 0; region < geometry().regions(); ++region) {
    std::memcpy(contents(region, block), from.contents(region, source_block),
                tokens * geometry().row_bytes(region));
  }
}

std::vector<uint64_t> PagedRange::page_addresses(size_t blocks) const {
  const std::lock_guard books(context()->books);
  if (blocks * geometry().tokens_per_block() > mapped_tokens()) {
    throw std::logic_error(
        "a page table of " + std::to_string(blocks) + " blocks was asked for; " +
        std::to_string(mapped_tokens() / geometry().tokens_per_block()) + " are mapped");
  }
  std::vector<uint64_t> addresses(blocks);
  for (size_t b = 0; b < blocks; ++b) {
    addresses[b] = static_cast<const ExtentHeap&>(*place(b).heap).block_address(place(b).block);
  }
  return addresses;
}

void require_one_block(const Geometry& geometry) {
  if (geometry.blocks_per_range() != 1 || geometry.blocks_per_heap() != 1) {
    throw std::invalid_argument("a dense range is one block, and so is its heap");
  }
}

Arena::Arena(Context& context, size_t slices, size_t max_buffer_bytes) : slices_(slices) {
  const size_t slice = context.geometry.range_bytes();
  if (slices == 0 || slice > max_buffer_bytes / slices) {
    throw std::runtime_error(
        "the dense backend needs one buffer for " + std::to_string(slices) + " sequences of " +
        std::to_string(slice) + " bytes, but a buffer has " + std::to_string(max_buffer_bytes) +
        " at most; fewer sequences or a smaller maximum context are needed");
  }
  buffer_ = make_shared_buffer(context.device.get(), slices * slice);
  context.residency.add(buffer_.get(), slices * slice);
}

std::shared_ptr<DeviceHeap> ArenaRange::slice() const {
  const std::lock_guard books(context()->books);
  return place(0).heap;
}

std::byte* ArenaRange::region(size_t index) const {
  const auto heap = slice();
  return heap == nullptr ? nullptr
                         : static_cast<const ArenaHeap&>(*heap).contents() +
                               geometry().range_region_offset(index);
}

uint64_t ArenaRange::row_base(size_t) const {
  const auto heap = slice();
  if (heap == nullptr) {
    throw std::logic_error("a dense range without a slice has no rows");
  }
  return static_cast<const ArenaHeap&>(*heap).offset();
}

BufferPlace ArenaRange::view(size_t region) const {
  return {arena_->buffer(), row_base(0) + geometry().range_region_offset(region)};
}

void ArenaRange::check_writable(bool writable) const {
  if (!writable) {
    throw std::invalid_argument("a dense range shares nothing, so that it is always writable");
  }
}

bool ArenaRange::attach(const Run&) {
  std::memset(region(0), 0, geometry().range_bytes());
  return true;
}

void ArenaRange::copy(DeviceRange& source, size_t, size_t, size_t tokens) {
  for (size_t r = 0; r < geometry().regions(); ++r) {
    std::memcpy(region(r), source.region(r), tokens * geometry().row_bytes(r));
  }
}

}  // namespace quire::metal
