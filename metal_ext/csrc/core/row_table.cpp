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
    for (int64_t i = 0; i < segment.count; ++i) {
      rows_.push_back({segment.range.get(), static_cast<size_t>(segment.start + i)});
    }
  }
}

}  // namespace quire
