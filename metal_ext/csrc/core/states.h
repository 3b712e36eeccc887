#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

// The memory of recurrent layers' states, and the plan of a step's reads and writes in it.
namespace quire {

// Memory for cells, which hold the states of recurrent layers. The memory is zeros at first, and is
// committed on first touch.
class StateMemory {
 public:
  static constexpr int64_t kMaxBytes = int64_t{1} << 46;

  // Rounds `bytes` up to whole pages. Throws std::out_of_range or std::system_error.
  explicit StateMemory(int64_t bytes);
  ~StateMemory();
  StateMemory(const StateMemory&) = delete;
  StateMemory& operator=(const StateMemory&) = delete;

  std::byte* address() const { return address_; }
  size_t bytes() const { return bytes_; }

  // Zeros whole pages and gives them back. Throws std::invalid_argument for a part of a page.
  void release(int64_t offset, int64_t bytes);
  size_t committed(int64_t offset, int64_t bytes) const;

 private:
  std::byte* pages_at(int64_t offset, int64_t bytes) const;

  size_t bytes_;
  std::byte* address_;
};

// Writes a segment's state to the cell at `address` after the segment's first `rows` rows.
struct StateWrite {
  int64_t rows;
  int64_t address;
};

// Consecutive rows of one sequence. `read`: the address of the cell with the state before them; 0:
// zeros.
struct StateSegment {
  int64_t count;
  int64_t read;
  std::vector<StateWrite> writes;  // ascending by rows; the last is after all rows
};

// The cells that a step's rows start from and write, for all recurrent layers. Built once per step.
// Tiles cut the rows for computation:
//   rows      | segment 0              | segment 1 ........................ |
//   tiles     | tile 0 ................ | tile 1 ......... | tile 2 ....... |
//   runs      | run       | run         | run      | run   | run            |
//                         ^ a write inside a tile  ^
class StateRows {
 public:
  static constexpr size_t kTileRows = 64;
  static constexpr int64_t kMaxRows = int64_t{1} << 24;

  // Rows without a write between them. The state is taken from one cell and left in another.
  struct Run {
    size_t first;  // index among all rows
    size_t count;
    const std::byte* from;  // null: zeros
    std::byte* to;
    bool written;  // true for a requested write; false when only the next run reads the state
  };
  // The rows of one segment in a tile.
  struct Part {
    size_t segment_first;  // index of the segment's first row among all rows
    const std::byte* read;  // the segment's first cell; null: zeros
    size_t first;
    size_t count;
    std::vector<Run> runs;
  };
  struct Tile {
    size_t first;
    size_t count;
    std::vector<Part> parts;
  };

  // memories: hold all cells, and are kept alive. Throws std::out_of_range for an address outside
  // them, std::invalid_argument unless writes ascend to the segment's count.
  StateRows(
      const std::vector<StateSegment>& segments,
      std::vector<std::shared_ptr<StateMemory>> memories);

  size_t size() const { return rows_; }
  const std::vector<Tile>& tiles() const { return tiles_; }

  // Throws std::out_of_range unless every cell has `bytes` bytes after the offset.
  void require_room(int64_t offset, size_t bytes) const;

 private:
  std::byte* cell(int64_t address);
  void add(const StateSegment& segment);
  void add_run(size_t segment_first, const std::byte* read, const Run& run);

  std::vector<std::shared_ptr<StateMemory>> memories_;
  size_t room_;  // the least number of bytes from a cell to the end of its memory
  size_t rows_ = 0;
  std::vector<Tile> tiles_;
};

}  // namespace quire
