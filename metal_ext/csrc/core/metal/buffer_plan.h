#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/geometry.h"

namespace quire::metal {

// Where a region lies: sparse, in which of a sequence's buffers; paged, in an extent.
struct RegionPlace {
  size_t buffer;    // always 0 on paged and dense
  uint64_t offset;  // bytes from that buffer's, or the extent's, start
};

// Which of a sequence's sparse buffers each region lies in, where one would be longer than the
// device allows. Cut between layers: regions 2i and 2i + 1 (keys and values) stay together.
//
//   buffer 0: | region 0 | region 1 | region 2 | region 3 |   buffer 1: | region 4 | region 5 | ...
struct BufferPlan {
  // Throws std::runtime_error where one layer alone is too long.
  BufferPlan(const Geometry& geometry, size_t max_buffer_bytes);

  // Neighbours in one buffer whose rows have the same length, and which therefore lie one
  // `stride` apart: what one dispatch fills or copies.
  struct Run {
    size_t first_region;
    size_t regions;
    uint64_t stride;
  };

  std::vector<size_t> bytes;        // of each buffer
  std::vector<RegionPlace> places;  // of each region
  std::vector<Run> runs;
};

}  // namespace quire::metal
