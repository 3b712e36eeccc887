#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "core/geometry.h"

namespace quire {

// Physical memory for a whole number of blocks.
class Heap {
 public:
  explicit Heap(const Geometry& geometry) : geometry_(geometry) {}
  virtual ~Heap() = default;
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  const Geometry& geometry() const { return geometry_; }

  // Bytes that the system charges for this heap now. Any thread.
  virtual size_t committed_bytes() const = 0;
  // Gives the memory of blocks [first, + count) back; none of them may be mapped. Throws
  // std::logic_error where the system cannot give back less than the whole heap (see
  // releases_blocks) and less is asked for.
  void release(int64_t first, int64_t count);
  virtual bool releases_blocks() const = 0;

 protected:
  virtual void release_memory(size_t first, size_t count) = 0;

 private:
  const Geometry geometry_;
};

// Shared memory that can be mapped behind any address range, at several places at once, writable or
// not at each.
class SharedHeap final : public Heap {
 public:
  explicit SharedHeap(const Geometry& geometry);
  ~SharedHeap() override;

  void map(void* address, size_t bytes, size_t offset, bool writable) const;
  size_t committed_bytes() const override;
  bool releases_blocks() const override;

 protected:
  void release_memory(size_t first, size_t count) override;

 private:
  mutable std::mutex mutex_;  // a Mac gives memory back by replacing the object
  int fd_;
  // A Mac charges an object, and all of it, from when it is first mapped.
  mutable bool is_charged_ = false;
};

// One plain allocation, charged in full from the start, as a device allocation is.
class DenseHeap final : public Heap {
 public:
  explicit DenseHeap(const Geometry& geometry);
  ~DenseHeap() override;

  // Commits the memory again if it was released. Called by the thread that maps it, and by those
  // that have seen it mapped.
  std::byte* memory();
  size_t committed_bytes() const override { return committed_.load(std::memory_order_relaxed); }
  bool releases_blocks() const override { return true; }

 protected:
  void release_memory(size_t first, size_t count) override;

 private:
  std::byte* const base_;  // reserved for the heap's life
  std::atomic<size_t> committed_{0};
};

}  // namespace quire
