#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/address_range.h"
#include "core/checked.h"

// A step's rows (tokens), and where the K and V of each row lie in memory.
namespace quire {

// The tokens at positions [start, start + count) of one sequence, whose K and V lie in `range`.
struct Segment {
  std::shared_ptr<AddressRange> range;
  int64_t start;
  int64_t count;
};

// The place of each row (token) of a step, found once for all layers. The constructor checks that
// each row is mapped. Before a kernel reads earlier rows, require_mapped() checks these.
class RowTable {
 public:
  struct Row {
    const AddressRange* range;
    size_t position;
    int64_t shift;  // see AddressRange::MappedRun

    // Returns the address at which the region's token 0 would lie if all tokens were mapped.
    std::byte* region(size_t index) const {
      return range->region(index) +
             shift * static_cast<int64_t>(range->geometry().row_bytes(index));
    }
  };

  // The most rows. A table of this many rows takes 256 MiB, and a step has far fewer.
  static constexpr int64_t kMaxRows = int64_t{1} << 24;

  // Throws std::out_of_range for unmapped rows, std::invalid_argument if geometries differ.
  explicit RowTable(std::vector<Segment> segments) : segments_(std::move(segments)) {
    require<std::invalid_argument>(
        !segments_.empty(), "a row table needs at least one segment");
    for (const Segment& segment : segments_) {
      require<std::invalid_argument>(segment.range->geometry() == geometry(),
                                     "the ranges of a row table must have one geometry");
      const AddressRange::MappedRun mapped =
          segment.range->mapped_run(static_cast<size_t>(std::max<int64_t>(segment.start, 0)));
      checked_run("segment of mapped tokens", segment.start, segment.count, mapped.end);
      if (mapped.first > 0) {
        longest_window_ = std::min<size_t>(longest_window_, segment.start - mapped.first + 1);
      }
      // Kernels of a GPU count positions in 32 bits.
      narrowed<int32_t>("tokens of a sequence", segment.start + segment.count);
      const auto block = segment.range->first_read_only(
          static_cast<size_t>(segment.start), static_cast<size_t>(segment.count));
      if (block && read_only_.empty()) {
        read_only_ = message("segment [", segment.start, ", ", segment.start, " + ", segment.count,
                             ") cannot be written: block ", *block, " is read-only");
      }
      checked_between(
          "number of rows", static_cast<int64_t>(rows_.size()) + segment.count, 1, kMaxRows);
      for (int64_t i = 0; i < segment.count; ++i) {
        rows_.push_back(
            {segment.range.get(), static_cast<size_t>(segment.start + i), mapped.shift});
      }
    }
  }

  const Geometry& geometry() const { return segments_.front().range->geometry(); }
  const std::vector<Segment>& segments() const { return segments_; }
  const std::vector<Row>& rows() const { return rows_; }

  // Throws std::out_of_range with the name of the first segment that has read-only rows.
  void require_writable() const {
    require<std::out_of_range>(read_only_.empty(), read_only_);
  }

  // Throws std::out_of_range if a row has unmapped rows in its window of this many tokens, itself
  // included. SIZE_MAX is a window of all tokens.
  void require_mapped(size_t window) const {
    require<std::out_of_range>(
        window <= longest_window_, "rows can see ", longest_window_,
        " tokens, and those before are unmapped: they cannot attend to all that they should");
  }

 private:
  size_t longest_window_ = SIZE_MAX;
  std::vector<Segment> segments_;  // keeps the ranges alive for the primitives
  std::vector<Row> rows_;
  std::string read_only_;  // the message of require_writable(), or empty
};

}  // namespace quire
