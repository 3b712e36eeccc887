#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "core/checked.h"
#include "core/posix_memory.h"

namespace quire {

// The layout of K and V in bytes. A region holds one layer's K or V. A block holds the same tokens
// in every region. The addresses of one sequence are a range:
//   | region 0: block 0 | block 1 | ... | region 1: block 0 | block 1 | ...
// The memory of h blocks is a heap. Mapping consecutive blocks takes one call per region:
//   | region 0: block 0 .. block h-1 | region 1: block 0 .. block h-1 | ...
// With a ring of R blocks, a region has 2 * R slots in place of one for each block of a context. A
// block is mapped at slots s and s + R, s < R, and the next block has the ring's next s. So up to R
// consecutive blocks lie one behind the other, from the first one's s on.
class Geometry {
 public:
  // page_bytes must be a multiple of the system's page size. region_row_bytes lists for each region
  // the size of a token. Throws std::out_of_range or std::invalid_argument, and names the argument.
  Geometry(
      int64_t page_bytes,
      int64_t tokens_per_block,
      int64_t blocks_per_heap,
      int64_t blocks_per_range,
      const std::vector<int64_t>& region_row_bytes,
      int64_t ring_blocks = 0)
      : page_bytes_(checked_between("page_bytes", page_bytes, 1, kMaxPageBytes)),
        tokens_per_block_(
            checked_between("tokens_per_block", tokens_per_block, 1, kMaxTokensPerBlock)),
        blocks_per_heap_(checked_between("blocks_per_heap", blocks_per_heap, 1, kMaxBlocks)),
        blocks_per_range_(checked_between("blocks_per_range", blocks_per_range, 1, kMaxBlocks)),
        ring_blocks_(checked_between("ring_blocks", ring_blocks, 0, kMaxBlocks)) {
    checked_between("number of regions", static_cast<int64_t>(region_row_bytes.size()), 1,
                    kMaxRegions);
    require<std::invalid_argument>(
        page_bytes_ % system_page_bytes() == 0, "page_bytes is ", page_bytes,
        "; it must be a multiple of the system's ", system_page_bytes(), "-byte page");
    for (int64_t row : region_row_bytes) {
      row_bytes_.push_back(checked_between("row_bytes", row, 1, kMaxRowBytes));
      region_start_.push_back(block_bytes_);
      const size_t region_block = row_bytes_.back() * tokens_per_block_;
      require<std::invalid_argument>(
          region_block % page_bytes_ == 0, tokens_per_block, " rows of ", row,
          " bytes are not a whole number of ", page_bytes, "-byte pages");
      block_bytes_ += region_block;
    }
    const auto most_blocks = static_cast<int64_t>(kMaxRangeBytes / block_bytes_);
    checked_between("blocks_per_range", static_cast<int64_t>(slots_per_range()), 1, most_blocks);
    checked_between("blocks_per_heap", blocks_per_heap, 1, most_blocks);
  }

  size_t page_bytes() const { return page_bytes_; }
  size_t tokens_per_block() const { return tokens_per_block_; }
  size_t blocks_per_heap() const { return blocks_per_heap_; }
  size_t blocks_per_range() const { return blocks_per_range_; }
  size_t ring_blocks() const { return ring_blocks_; }  // 0 without a ring
  size_t slots_per_range() const { return ring_blocks_ > 0 ? 2 * ring_blocks_ : blocks_per_range_; }
  size_t regions() const { return row_bytes_.size(); }

  size_t row_bytes(size_t region) const { return row_bytes_[region]; }
  size_t region_block_bytes(size_t region) const {
    return row_bytes_[region] * tokens_per_block_;
  }
  size_t range_region_offset(size_t region) const {
    return region_start_[region] * slots_per_range();
  }
  size_t heap_region_offset(size_t region) const {
    return region_start_[region] * blocks_per_heap_;
  }
  size_t block_bytes() const { return block_bytes_; }
  size_t range_bytes() const { return block_bytes_ * slots_per_range(); }
  size_t heap_bytes() const { return block_bytes_ * blocks_per_heap_; }

  bool operator==(const Geometry&) const = default;

 private:
  static constexpr int64_t kMaxPageBytes = int64_t{1} << 36;  // a dense page is a whole region
  static constexpr int64_t kMaxTokensPerBlock = int64_t{1} << 24;
  static constexpr int64_t kMaxBlocks = int64_t{1} << 24;
  static constexpr int64_t kMaxRegions = int64_t{1} << 12;
  static constexpr int64_t kMaxRowBytes = int64_t{1} << 20;
  static constexpr size_t kMaxRangeBytes = size_t{1} << 46;  // a process has 47 bits of addresses

  size_t page_bytes_;
  size_t tokens_per_block_;
  size_t blocks_per_heap_;
  size_t blocks_per_range_;
  size_t ring_blocks_;
  std::vector<size_t> row_bytes_;
  std::vector<size_t> region_start_;  // offset of each region in a block, in bytes
  size_t block_bytes_ = 0;
};

}  // namespace quire
