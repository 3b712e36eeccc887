#pragma once

#include <atomic>
#include <cstdint>

namespace quire {

// How many K and V bytes block_copy has copied: the promise "nothing is copied when a sequence
// joins, leaves or grows" is read off it.
class CopyCounter {
 public:
  void add(uint64_t bytes) { bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> bytes_{0};
};

}  // namespace quire
