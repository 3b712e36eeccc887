#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/metal/cells.h"
#include "core/row_table.h"
#include "mlx/array.h"
#include "ops/metal/encoder.h"

// The rows of a step and the cells that they use, on the device.
namespace quire::ops {

// The work of one decode call, cut into tasks of the kernels.
struct DecodeCut {
  mx::array tasks;       // DecodeTask [count]
  mx::array first_task;  // uint32 [rows + 1]
  size_t count;
  bool combines;         // whether a row has several
};

// The rows of one step, on the device: made once and used by all layers. Making it opens the step's
// epoch, after which everything that the rows show stays mapped until it completes.
class MetalRows {
 public:
  // As RowTable, and std::logic_error where a row would be written in a sealed block.
  MetalRows(std::shared_ptr<MetalSubstrate> substrate, std::vector<Segment> segments);

  const RowTable& table() const { return table_; }
  size_t size() const { return table_.rows().size(); }
  const std::shared_ptr<MetalSubstrate>& substrate() const { return substrate_; }
  // Number in the table of a segment's first row.
  size_t first_row(size_t segment) const { return first_rows_[segment]; }

  uint64_t epoch() const { return epoch_; }
  // Throws std::logic_error that names the operation where the step has ended.
  void require_open(const char* operation) const;
  // The step's end is part of the graph: nothing more may be added to it. Throws std::logic_error
  // the second time, and where an older step has no end yet.
  void close();
  // The step's end has been encoded: a later command would use memory of another sequence.
  void end() { ended_ = true; }
  void require_not_ended(const char* operation) const;
  // The step failed, and nothing of it runs any more.
  void abandon();

  // RowEntry [buffer][row] of the ranges' buffers. An input of every operation over the rows, as
  // MLX keeps inputs until they have been used, and this one keeps all else.
  const mx::array& entries() const { return entries_; }
  int64_t entries_offset(size_t buffer) const;  // bytes
  // Paged: uint64 GPU addresses of blocks, which entries point into. On others, any array.
  const mx::array& pages() const { return pages_; }
  // The buffers that a view may show while the step writes them, each as an array of one element:
  // sparse, buffer number `buffer` of the ranges that get several rows; dense, the arena; paged,
  // none, because nothing can show them.
  const std::vector<mx::array>& written(size_t buffer) const { return written_[buffer]; }
  // Rows [first, + count) of the table. Kept for the next layer.
  const DecodeCut& decode_cut(size_t first, size_t count);

 private:
  void use_ranges();
  void find_written();
  void find_entries();

  const std::shared_ptr<MetalSubstrate> substrate_;
  const RowTable table_;
  const uint64_t epoch_;
  bool closed_ = false;
  bool ended_ = false;
  std::vector<size_t> first_rows_;
  mx::array entries_;
  mx::array pages_;
  std::vector<std::vector<mx::array>> written_;
  std::map<std::pair<size_t, size_t>, DecodeCut> cuts_;
};

// Throws std::invalid_argument unless the rows are of this substrate.
void check_substrate_of(
    const MetalRows& rows, const std::shared_ptr<MetalSubstrate>& substrate);
// The same, and std::logic_error where their step has ended.
void check_rows_of(
    const char* operation, const MetalRows& rows,
    const std::shared_ptr<MetalSubstrate>& substrate);

// Which cells the rows of a step begin with and end in, on the device: made once and used by all
// recurrent layers.
class MetalStateRows {
 public:
  // rows: of the step, whose epoch the cells' uses belong to. segments: of all rows, in their
  // order. Throws what Cells::use() does, and std::invalid_argument where the substrate has no
  // cells or the segments are not as many rows.
  MetalStateRows(
      std::shared_ptr<MetalRows> rows, const std::vector<metal::CellSegment>& segments);

  const std::shared_ptr<MetalRows>& rows() const { return rows_; }
  uint32_t segments() const { return segments_; }
  // Throws std::out_of_range unless a cell has `bytes` behind the offset.
  void require_room(int64_t offset, size_t bytes) const;

  // DeltaSegment [segments], and DeltaWrite of all of them. The first is an input of every
  // operation over the rows, as MLX keeps inputs until they have been used, and this one keeps all
  // else.
  const mx::array& begun() const { return begun_; }
  const mx::array& written() const { return written_; }
  // Dense: stands for the cells' buffer, which kernels bind.
  const std::optional<mx::array>& arena() const { return arena_; }

 private:
  const metal::Cells& cells() const { return *rows_->substrate()->memory->cells(); }

  const std::shared_ptr<MetalRows> rows_;
  uint32_t segments_ = 0;
  mx::array begun_;
  mx::array written_;
  std::optional<mx::array> arena_;
};

using DeviceRows = std::shared_ptr<MetalRows>;
using DeviceStateRows = std::shared_ptr<const MetalStateRows>;

}  // namespace quire::ops
