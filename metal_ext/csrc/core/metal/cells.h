#pragma once

#include <Metal/Metal.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "core/metal/context.h"

namespace quire::metal {

// Consecutive rows of one sequence in a step, with the cells that they start from and write.
struct CellSegment {
  struct Write {
    size_t rows;  // the write follows the first `rows` rows
    size_t cell;
  };
  size_t count;
  std::optional<size_t> read;  // none: zeros
  std::vector<Write> writes;   // ascending by rows; the last is after all rows
};

// A fixed number of cells, the states of recurrent layers, in buffers that stay until the end.
// Engine's thread only.
//   buffer 0 | cell 0 | cell 1 | cell 2 |   buffer 1 | cell 3 | cell 4 | ...
// Rule: a cell is overwritten only after every step that may touch the cell has completed. A
// sequence may overwrite the cell that it reads: the cache token orders its steps. A violation is a
// std::logic_error that names cell and epochs, before anything is encoded.
class Cells {
 public:
  // most: bytes of a buffer. Throws std::invalid_argument unless cell_bytes is a multiple of 16,
  // std::runtime_error for a buffer that is too long, std::system_error(ENOMEM) if refused.
  Cells(Context& context, size_t count, size_t cell_bytes, size_t most);

  size_t count() const { return uses_.size(); }
  size_t cell_bytes() const { return cell_bytes_; }
  // The cell's address as kernels take it: a GPU address, or on dense the offset in the buffer.
  uint64_t place(size_t cell) const;
  // Dense: the one buffer, which kernels bind. Other kinds: null.
  MTL::Buffer* arena() const;

  // Notes the cells that the step `epoch` uses, and enforces the rule. Throws std::out_of_range for
  // an unknown cell, std::invalid_argument unless writes ascend to the segment's count.
  void use(uint64_t epoch, const std::vector<CellSegment>& segments);

  void drop() { buffers_.clear(); }

 private:
  // The newest epochs that touched a cell; 0: none.
  struct Use {
    uint64_t written = 0;
    uint64_t read = 0;  // by sequences that do not write the cell
  };

  void check(const CellSegment& segment) const;
  // readers: for each cell, the number of the step's segments that read it.
  void check_use(
      uint64_t epoch, const CellSegment& segment, const std::map<size_t, size_t>& readers) const;

  Context& context_;
  const size_t cell_bytes_;
  size_t cells_per_buffer_;
  std::vector<NS::SharedPtr<MTL::Buffer>> buffers_;
  std::vector<Use> uses_;
};

}  // namespace quire::metal
