#include "core/geometry.h"

#include <stdexcept>
#include <string>

#include "core/checked.h"
#include "core/posix_memory.h"

namespace quire {
namespace {

constexpr int64_t kMaxPageBytes = int64_t{1} << 36;  // dense: a page is a whole region
constexpr int64_t kMaxTokensPerBlock = int64_t{1} << 24;
constexpr int64_t kMaxBlocks = int64_t{1} << 24;
constexpr int64_t kMaxRegions = int64_t{1} << 12;
constexpr int64_t kMaxRowBytes = int64_t{1} << 20;
constexpr size_t kMaxRangeBytes = size_t{1} << 46;  // of the 47 bits of a user address space

}  // namespace

Geometry::Geometry(
    int64_t page_bytes,
    int64_t tokens_per_block,
    int64_t blocks_per_heap,
    int64_t blocks_per_range,
    const std::vector<int64_t>& region_row_bytes)
    : page_bytes_(checked_between("page_bytes", page_bytes, 1, kMaxPageBytes)),
      tokens_per_block_(
          checked_between("tokens_per_block", tokens_per_block, 1, kMaxTokensPerBlock)),
      blocks_per_heap_(checked_between("blocks_per_heap", blocks_per_heap, 1, kMaxBlocks)),
      blocks_per_range_(checked_between("blocks_per_range", blocks_per_range, 1, kMaxBlocks)) {
  checked_between("number of regions", static_cast<int64_t>(region_row_bytes.size()), 1,
                  kMaxRegions);
  if (page_bytes_ % system_page_bytes() != 0) {
    throw std::invalid_argument(
        "page_bytes is " + std::to_string(page_bytes) + "; it must be a multiple of the system's " +
        std::to_string(system_page_bytes()) + "-byte page");
  }
  for (int64_t row : region_row_bytes) {
    row_bytes_.push_back(checked_between("row_bytes", row, 1, kMaxRowBytes));
    region_start_.push_back(block_bytes_);
    const size_t region_block = row_bytes_.back() * tokens_per_block_;
    if (region_block % page_bytes_ != 0) {
      throw std::invalid_argument(
          std::to_string(tokens_per_block) + " rows of " + std::to_string(row) +
          " bytes are not a whole number of " + std::to_string(page_bytes) + "-byte pages");
    }
    block_bytes_ += region_block;
  }
  const size_t most_blocks = kMaxRangeBytes / block_bytes_;
  checked_between("blocks_per_range", blocks_per_range, 1, static_cast<int64_t>(most_blocks));
  checked_between("blocks_per_heap", blocks_per_heap, 1, static_cast<int64_t>(most_blocks));
}

}  // namespace quire
