#include "core/metal/dense.h"

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

namespace quire::metal {

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
  const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  buffer_ = NS::TransferPtr(context.device->newBuffer(
      slices * slice, MTL::ResourceStorageModeShared | MTL::ResourceHazardTrackingModeUntracked));
  if (!buffer_) {
    throw std::system_error(
        ENOMEM, std::generic_category(),
        "a GPU buffer of " + std::to_string(slices * slice) + " bytes");
  }
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
