#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "core/geometry.h"

namespace quire {

// Physical memory for a whole number of blocks of K and V, which can be mapped in ranges.
class Heap {
 public:
  explicit Heap(const Geometry& geometry) : geometry_(geometry) {}
  virtual ~Heap() = default;
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  const Geometry& geometry() const { return geometry_; }

  // Returns how many bytes of this heap the system counts as used. Any thread may call this.
  virtual size_t committed_bytes() const = 0;
  // Gives the memory of unmapped blocks [first, first + count) back to the system. If
  // releases_blocks() is false, throws std::logic_error unless these are all blocks of the heap.
  void release(int64_t first, int64_t count);
  virtual bool releases_blocks() const = 0;

 protected:
  virtual void release_memory(size_t first, size_t count) = 0;

 private:
  const Geometry geometry_;
};

// Shared memory that may be mapped in several ranges at once, writable or read-only in each.
class SharedHeap final : public Heap {
 public:
  explicit SharedHeap(const Geometry& geometry);
  ~SharedHeap() override;

  void map(void* address, size_t bytes, size_t offset, bool writable) const;
  size_t committed_bytes() const override;
  bool releases_blocks() const override { return kPunchesHoles; }

 protected:
  void release_memory(size_t first, size_t count) override;

 private:
  mutable std::mutex mutex_;  // guards fd_, which release_memory() replaces on a Mac
  int fd_;
  // True if macOS counts the heap as used. The first mapping makes macOS count the whole heap.
  mutable bool is_charged_ = false;
};

// One private allocation. Like memory of a GPU, all of it counts as used once it is made.
class DenseHeap final : public Heap {
 public:
  explicit DenseHeap(const Geometry& geometry);
  ~DenseHeap() override;

  // Returns the heap's memory, and allocates the memory first if necessary.
  std::byte* memory();
  size_t committed_bytes() const override { return committed_.load(std::memory_order_relaxed); }
  bool releases_blocks() const override { return true; }

 protected:
  void release_memory(size_t first, size_t count) override;

 private:
  std::byte* const base_;  // reserved until the heap ends
  std::atomic<size_t> committed_{0};
};

}  // namespace quire
