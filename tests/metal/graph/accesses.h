#pragma once

#include <cstdint>
#include <string>
#include <vector>

// What quire's kernels touch, from the arguments that are bound, worked out apart from their texts.
namespace quire::graph {

struct Touch {
  uint64_t address;
  uint64_t bytes;
  bool write;
};

// The kernel's buffers, by index. Throws std::logic_error where the kernel is none of ours.
struct Bindings {
  int count;                // 0 to count - 1: none may be missing
  std::vector<int> writes;  // arrays; all others are read, and so are rows in none of them
};
const Bindings& bindings_of(const std::string& kernel);

// Rows of K and V that the kernel touches, in the memory of a backend. buffers: the address that is
// bound at each index. grid: the threadgroups, or threads, that run.
std::vector<Touch> rows_touched(
    const std::string& kernel, void* const* buffers, const uint64_t grid[3]);

}  // namespace quire::graph
