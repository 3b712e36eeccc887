#include "core/row_table.h"

#include <stdexcept>
#include <utility>

#include "core/checked.h"

namespace quire {

RowTable::RowTable(std::vector<Segment> segments) : segments_(std::move(segments)) {
  if (segments_.empty()) {
    throw std::invalid_argument("a row table needs at least one segment");
  }
  for (const Segment& segment : segments_) {
    if (!(segment.range->geometry() == geometry())) {
      throw std::invalid_argument("the ranges of a row table must have one geometry");
    }
    checked_run(
        "segment of mapped tokens", segment.start, segment.count, segment.range->mapped_tokens());
    // The GPU's kernels count positions in 32 bits.
    narrowed<int32_t>("tokens of a sequence", segment.start + segment.count);
    const auto block = segment.range->first_read_only(
        static_cast<size_t>(segment.start), static_cast<size_t>(segment.count));
    if (block && read_only_.empty()) {
      read_only_ = "segment [" + std::to_string(segment.start) + ", " +
                   std::to_string(segment.start) + " + " + std::to_string(segment.count) +
                   ") cannot be written: block " + std::to_string(*block) + " is read-only";
    }
    checked_between(
        "number of rows", static_cast<int64_t>(rows_.size()) + segment.count, 1, kMaxRows);
    for (int64_t i = 0; i < segment.count; ++i) {
      rows_.push_back({segment.range.get(), static_cast<size_t>(segment.start + i)});
    }
  }
}

void RowTable::require_writable() const {
  if (!read_only_.empty()) {
    throw std::out_of_range(read_only_);
  }
}

}  // namespace quire
