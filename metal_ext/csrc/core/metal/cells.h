#pragma once

#include <Metal/Metal.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "core/metal/context.h"

namespace quire::metal {

// Consecutive rows of one sequence in a step, and by number the cells that they begin with and end
// in.
struct CellSegment {
  struct Write {
    size_t rows;  // the write comes after this many of them
    size_t cell;
  };
  size_t count;
  std::optional<size_t> read;  // nothing: zeros
  std::vector<Write> writes;   // rows ascending; the last one's are all
};

// Memory for cells, which recurrent layers keep their states in: a fixed number of them, in
// ordinary buffers that are made once and stay until the substrate ends.
//
//   buffer 0 | cell 0 | cell 1 | cell 2 |   buffer 1 | cell 3 | cell 4 | ...
//
// Rule: a cell is written anew only when every step that may touch it has completed. The sequence
// that goes on in the cell that it reads is ordered behind its own steps by the cache token. What
// breaks the rule is a std::logic_error that names cell and epochs, before anything is encoded.
//
// Engine's thread.
class Cells {
 public:
  // most: bytes of a buffer. Throws std::invalid_argument where cells do not begin at multiples of
  // 16 bytes, std::runtime_error where a buffer cannot be that long, std::system_error(ENOMEM)
  // where the device refuses.
  Cells(Context& context, size_t count, size_t cell_bytes, size_t most);

  size_t count() const { return uses_.size(); }
  size_t cell_bytes() const { return cell_bytes_; }
  // The place of a cell as kernels take it: its GPU address; on dense, bytes from its buffer's
  // start.
  uint64_t place(size_t cell) const;
  // Dense: the one buffer, which kernels bind. Null on others.
  MTL::Buffer* arena() const;

  // A step that started as `epoch` does this with cells. Throws std::out_of_range for a cell that
  // is not there, std::invalid_argument where writes do not ascend to the segment's count.
  void use(uint64_t epoch, const std::vector<CellSegment>& segments);

  void drop() { buffers_.clear(); }

 private:
  // The newest steps that have touched a cell; 0: none.
  struct Use {
    uint64_t written = 0;
    uint64_t read = 0;  // by sequences that do not write it
  };

  void check(const CellSegment& segment) const;
  // `readers`: of each cell, how many segments of the step read it.
  void check_use(
      uint64_t epoch, const CellSegment& segment, const std::map<size_t, size_t>& readers) const;

  Context& context_;
  const size_t cell_bytes_;
  size_t cells_per_buffer_;
  std::vector<NS::SharedPtr<MTL::Buffer>> buffers_;
  std::vector<Use> uses_;
};

}  // namespace quire::metal
