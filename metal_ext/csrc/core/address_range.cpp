#include "core/address_range.h"

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

#include "core/checked.h"
#include "core/posix_memory.h"

namespace quire {
namespace {

// Replacing a mapping frees its pages under the process's memory lock; pieces keep other threads'
// page faults from waiting long.
constexpr size_t kUnmapPieceBytes = size_t{64} << 20;

}  // namespace

void AddressRange::require(size_t block, size_t count, bool mapped) const {
  for (size_t b = block; b < block + count; ++b) {
    if (mapped_[b] != mapped) {
      throw std::logic_error(
          "block " + std::to_string(b) + (mapped ? " is not mapped" : " is mapped already"));
    }
  }
}

void AddressRange::map(
    const std::shared_ptr<Heap>& heap, int64_t heap_block, int64_t block, int64_t count) {
  checked_run("range blocks", block, count, geometry_.blocks_per_range());
  checked_run("heap blocks", heap_block, count, geometry_.blocks_per_heap());
  if (!(heap->geometry() == geometry_)) {
    throw std::invalid_argument("the heap and the range have different geometries");
  }
  const auto first = static_cast<size_t>(block);
  const auto blocks = static_cast<size_t>(count);
  const std::lock_guard lock(mutex_);
  require(first, blocks, false);
  map_memory(heap, static_cast<size_t>(heap_block), first, blocks);
  std::fill_n(mapped_.begin() + block, blocks, true);
  while (mapped_prefix_ < mapped_.size() && mapped_[mapped_prefix_]) {
    ++mapped_prefix_;
  }
}

void AddressRange::unmap(int64_t block, int64_t count) {
  checked_run("range blocks", block, count, geometry_.blocks_per_range());
  const auto first = static_cast<size_t>(block);
  const auto blocks = static_cast<size_t>(count);
  const std::lock_guard lock(mutex_);
  require(first, blocks, true);
  unmap_memory(first, blocks);
  std::fill_n(mapped_.begin() + block, blocks, false);
  mapped_prefix_ = std::min(mapped_prefix_, first);
}

size_t AddressRange::mapped_tokens() const {
  const std::lock_guard lock(mutex_);
  return mapped_prefix_ * geometry_.tokens_per_block();
}

SparseRange::SparseRange(const Geometry& geometry)
    : AddressRange(geometry), base_(reserve_addresses(geometry.range_bytes())) {}

SparseRange::~SparseRange() {
  release_addresses(base_, geometry().range_bytes());
}

void SparseRange::map_memory(
    const std::shared_ptr<Heap>& heap, size_t heap_block, size_t block, size_t count) {
  const auto* shared = dynamic_cast<const SharedHeap*>(heap.get());
  if (shared == nullptr) {
    throw std::invalid_argument("a sparse range takes blocks of shared heaps only");
  }
  spare_ = spare_ || make_spare(base_);
  if (!spare_) {  // what is mapped now must be possible to undo
    throw std::system_error(ENOMEM, std::generic_category(), "making a spare mapping");
  }
  const Geometry& shape = geometry();
  for (size_t r = 0; r < shape.regions(); ++r) {
    const size_t bytes = shape.region_block_bytes(r);
    try {
      shared->map(region(r) + block * bytes, count * bytes,
                  shape.heap_region_offset(r) + heap_block * bytes);
    } catch (const std::system_error&) {
      for (size_t done = 0; done < r; ++done) {
        const size_t undo = shape.region_block_bytes(done);
        clear(region(done) + block * undo, count * undo);
      }
      throw;
    }
  }
}

void SparseRange::unmap_memory(size_t block, size_t count) {
  const Geometry& shape = geometry();
  for (size_t r = 0; r < shape.regions(); ++r) {
    const size_t bytes = shape.region_block_bytes(r);
    std::byte* const end = region(r) + (block + count) * bytes;
    for (std::byte* piece = region(r) + block * bytes; piece < end; piece += kUnmapPieceBytes) {
      clear(piece, std::min(kUnmapPieceBytes, static_cast<size_t>(end - piece)));
    }
  }
}

void SparseRange::clear(std::byte* first, size_t bytes) {
  try {
    map_nothing(first, bytes);
  } catch (const std::system_error&) {
    if (!spare_) {
      throw;
    }
    give_up_spare(base_);
    spare_ = false;
    map_nothing(first, bytes);
    spare_ = make_spare(base_);
  }
}

DenseRange::DenseRange(const Geometry& geometry) : AddressRange(geometry) {
  if (geometry.blocks_per_range() != 1 || geometry.blocks_per_heap() != 1) {
    throw std::invalid_argument("a dense range is one block, and so is its heap");
  }
}

std::byte* DenseRange::base() const {
  return heap_ == nullptr ? nullptr : static_cast<DenseHeap&>(*heap_).memory();
}

void DenseRange::map_memory(const std::shared_ptr<Heap>& heap, size_t, size_t, size_t) {
  auto* const dense = dynamic_cast<DenseHeap*>(heap.get());
  if (dense == nullptr) {
    throw std::invalid_argument("a dense range takes a dense heap only");
  }
  dense->memory();  // commits it, or throws
  heap_ = heap;
}

void DenseRange::unmap_memory(size_t, size_t) {
  heap_ = nullptr;
}

}  // namespace quire
