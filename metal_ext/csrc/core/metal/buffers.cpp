#include "core/metal/buffers.h"

#include <cstring>
#include <stdexcept>

#include "core/checked.h"

// Implements two kinds of GPU memory that need no mappings: paged and dense.
namespace quire::metal {

void require_equal_rows(const Geometry& geometry) {
  for (size_t region = 1; region < geometry.regions(); ++region) {
    require<std::invalid_argument>(
        geometry.row_bytes(region) == geometry.row_bytes(0),
        "the paged backend and a ring need rows of one length, but region 0 has ",
        geometry.row_bytes(0), " bytes per row and region ", region, " has ",
        geometry.row_bytes(region));
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

std::byte* PagedRange::contents(const Place& at, size_t region) const {
  return static_cast<const ExtentHeap&>(*at.heap).contents(region, at.block);
}

bool PagedRange::attach(const Run& run) {
  for (size_t region = 0; run.writable && region < geometry().regions(); ++region) {
    // The blocks of a run are adjacent in memory, because they lie in one heap.
    const size_t bytes = run.count * geometry().region_block_bytes(region);
    std::memset(contents(place(run.block), region), 0, bytes);
  }
  return true;
}

void PagedRange::copy(DeviceRange& source, size_t source_block, size_t block, size_t tokens) {
  const auto& from = static_cast<const PagedRange&>(source);
  for (size_t region = 0; region < geometry().regions(); ++region) {
    std::memcpy(contents(place(block), region), from.contents(from.place(source_block), region),
                tokens * geometry().row_bytes(region));
  }
}

std::vector<uint64_t> PagedRange::page_addresses(size_t blocks) const {
  const std::lock_guard books(context()->books);
  const size_t tokens = geometry().tokens_per_block();
  const MappedRun mapped = mapped_run(blocks == 0 ? 0 : (blocks - 1) * tokens);
  require<std::logic_error>(blocks <= mapped.end / tokens, "a page table of ", blocks,
                            " blocks was asked for; ", mapped.end / tokens, " are mapped");
  std::vector<uint64_t> addresses(blocks);  // 0 for blocks behind a window
  for (size_t b = mapped.first / tokens; b < blocks; ++b) {
    addresses[b] = static_cast<const ExtentHeap&>(*place(b).heap).block_address(place(b).block);
  }
  return addresses;
}

Arena::Arena(Context& context, size_t slices, size_t max_buffer_bytes) : slices_(slices) {
  const size_t slice = context.geometry.range_bytes();
  require<std::runtime_error>(
      slices > 0 && slice <= max_buffer_bytes / slices, "the dense backend needs one buffer for ",
      slices, " sequences of ", slice, " bytes, but a buffer has ", max_buffer_bytes,
      " at most; fewer sequences or a smaller maximum context are needed");
  buffer_ = make_shared_buffer(context.device.get(), slices * slice);
  context.residency.add(buffer_.get(), slices * slice);
}

std::shared_ptr<DeviceHeap> ArenaRange::slice() const {
  const std::lock_guard books(context()->books);
  return place(0).heap;
}

std::byte* ArenaRange::contents(const Place& at, size_t region) const {
  return static_cast<const ArenaHeap&>(*at.heap).contents() +
         geometry().range_region_offset(region);
}

std::byte* ArenaRange::region(size_t index) const {
  const auto heap = slice();
  return heap == nullptr ? nullptr : contents({heap}, index);
}

uint64_t ArenaRange::row_base(size_t) const {
  const auto heap = slice();
  require<std::logic_error>(heap != nullptr, "a dense range without a slice has no rows");
  return static_cast<const ArenaHeap&>(*heap).offset();
}

BufferPlace ArenaRange::view(size_t region) const {
  return {arena_->buffer(), row_base(0) + geometry().range_region_offset(region)};
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
