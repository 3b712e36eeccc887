#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace quire {

// The shape of one group of regions, as bytes. A block is the same run of tokens in every region.
//
// Address range, region-major, one contiguous array per region:
//
//   | region 0: block 0 | block 1 | ... | region 1: block 0 | block 1 | ...
//
// Heap, region-major as well, so that consecutive blocks of a heap stay consecutive in every region
// of a range and one mapping serves the whole run:
//
//   | region 0: block 0 .. block h-1 | region 1: block 0 .. block h-1 | ...
class Geometry {
 public:
  // page_bytes: a multiple of the system's page. region_row_bytes: bytes of one token in each
  // region. Throws std::out_of_range or std::invalid_argument with the figure that does not fit.
  Geometry(
      int64_t page_bytes,
      int64_t tokens_per_block,
      int64_t blocks_per_heap,
      int64_t blocks_per_range,
      const std::vector<int64_t>& region_row_bytes);

  size_t page_bytes() const { return page_bytes_; }
  size_t tokens_per_block() const { return tokens_per_block_; }
  size_t blocks_per_heap() const { return blocks_per_heap_; }
  size_t blocks_per_range() const { return blocks_per_range_; }
  size_t regions() const { return row_bytes_.size(); }
  size_t max_tokens() const { return blocks_per_range_ * tokens_per_block_; }

  size_t row_bytes(size_t region) const { return row_bytes_[region]; }
  size_t region_block_bytes(size_t region) const {
    return row_bytes_[region] * tokens_per_block_;
  }
  size_t range_region_offset(size_t region) const {
    return region_start_[region] * blocks_per_range_;
  }
  size_t heap_region_offset(size_t region) const {
    return region_start_[region] * blocks_per_heap_;
  }
  size_t block_bytes() const { return block_bytes_; }
  size_t range_bytes() const { return block_bytes_ * blocks_per_range_; }
  size_t heap_bytes() const { return block_bytes_ * blocks_per_heap_; }

  bool operator==(const Geometry&) const = default;

 private:
  size_t page_bytes_;
  size_t tokens_per_block_;
  size_t blocks_per_heap_;
  size_t blocks_per_range_;
  std::vector<size_t> row_bytes_;
  std::vector<size_t> region_start_;  // bytes of one block that lie before each region
  size_t block_bytes_ = 0;
};

}  // namespace quire
