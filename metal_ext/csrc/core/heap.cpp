#include "core/heap.h"

#include <cstring>
#include <stdexcept>

#include "core/checked.h"
#include "core/posix_memory.h"

// Implements the memory of blocks: heaps in shared memory, and heaps in private memory.
namespace quire {

void Heap::release(int64_t first, int64_t count) {
  checked_run("heap blocks", first, count, geometry_.blocks_per_heap());
  const bool whole = static_cast<size_t>(count) == geometry_.blocks_per_heap();
  require<std::logic_error>(
      whole || releases_blocks(), "this system gives back whole heaps only");
  release_memory(static_cast<size_t>(first), static_cast<size_t>(count));
}

SharedHeap::SharedHeap(const Geometry& geometry)
    : Heap(geometry), fd_(create_shared_memory(geometry.heap_bytes())) {}

SharedHeap::~SharedHeap() {
  close_shared_memory(fd_);
}

void SharedHeap::map(void* address, size_t bytes, size_t offset, bool writable) const {
  const std::lock_guard lock(mutex_);
  map_shared(address, bytes, fd_, offset, writable);
  is_charged_ = true;
}

size_t SharedHeap::committed_bytes() const {
  const std::lock_guard lock(mutex_);
  return kPunchesHoles || is_charged_ ? shared_memory_committed(fd_) : 0;
}

void SharedHeap::release_memory(size_t first, size_t count) {
  const Geometry& shape = geometry();
  if (!kPunchesHoles) {
    const std::lock_guard lock(mutex_);
    close_shared_memory(fd_);
    fd_ = create_shared_memory(shape.heap_bytes());
    is_charged_ = false;
    return;
  }
  if (count == shape.blocks_per_heap()) {
    punch_hole(fd_, 0, shape.heap_bytes());
    return;
  }
  for (size_t region = 0; region < shape.regions(); ++region) {
    const size_t block = shape.region_block_bytes(region);
    punch_hole(fd_, shape.heap_region_offset(region) + first * block, count * block);
  }
}

DenseHeap::DenseHeap(const Geometry& geometry)
    : Heap(geometry), base_(reserve_addresses(geometry.heap_bytes())) {}

DenseHeap::~DenseHeap() {
  release_addresses(base_, geometry().heap_bytes());
}

std::byte* DenseHeap::memory() {
  if (committed_.load() == 0) {
    const size_t bytes = geometry().heap_bytes();
    map_private_zeros(base_, bytes);
    std::memset(base_, 0, bytes);
    committed_.store(bytes);
  }
  return base_;
}

void DenseHeap::release_memory(size_t, size_t) {
  map_nothing(base_, geometry().heap_bytes());
  committed_.store(0);
}

}  // namespace quire
