#include "core/metal/paged.h"

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

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
  const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  const size_t bytes = geometry().heap_bytes();
  buffer_ = NS::TransferPtr(context()->device->newBuffer(
      bytes, MTL::ResourceStorageModeShared | MTL::ResourceHazardTrackingModeUntracked));
  if (!buffer_) {
    throw std::system_error(
        ENOMEM, std::generic_category(), "a GPU buffer of " + std::to_string(bytes) + " bytes");
  }
  context()->residency.add(buffer_.get(), bytes);
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
    // One run of one extent, so that blocks lie side by side.
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

}  // namespace quire::metal
