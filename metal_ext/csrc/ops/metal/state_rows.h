#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/metal/cells.h"
#include "mlx/array.h"
#include "ops/metal/rows.h"

namespace quire::ops {

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
  // Throws std::out_of_range unless a cell has so many bytes behind the offset.
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

}  // namespace quire::ops
