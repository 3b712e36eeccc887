#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

// The memory of recurrent layers, and which of it the rows of a step read and write.
namespace quire {

// Memory for cells, which recurrent layers keep their states in: zeros until they are written, at
// an address that never changes. Pages are committed when they are touched.
class StateMemory {
 public:
  static constexpr int64_t kMaxBytes = int64_t{1} << 46;

  // Takes at least `bytes`, in whole pages. Throws std::out_of_range, and std::system_error where
  // the system has no addresses.
  explicit StateMemory(int64_t bytes);
  ~StateMemory();
  StateMemory(const StateMemory&) = delete;
  StateMemory& operator=(const StateMemory&) = delete;

  std::byte* address() const { return address_; }
  size_t bytes() const { return bytes_; }

  // Gives the memory of [offset, offset + bytes) back to the system: it holds zeros then. Throws
  // std::out_of_range, and std::invalid_argument where these are no whole pages.
  void release(int64_t offset, int64_t bytes);
  // How much of [offset, offset + bytes) is in memory. Throws as release() does.
  size_t committed(int64_t offset, int64_t bytes) const;

 private:
  std::byte* pages_at(int64_t offset, int64_t bytes) const;

  size_t bytes_;
  std::byte* address_;
};

// After the first `rows` rows of a segment its state is written to the cell at that address.
struct StateWrite {
  int64_t rows;
  int64_t address;
};

// Consecutive rows of one sequence. They begin with what the cell at `read` holds; 0: with zeros.
struct StateSegment {
  int64_t count;
  int64_t read;
  std::vector<StateWrite> writes;  // rows ascending; the last one's are all
};

// Which cells the rows of a step begin with and end in, for every recurrent layer alike. Made once
// per step. The rows are cut to be computed tile by tile:
//
//   rows      | segment 0              | segment 1 ........................ |
//   tiles     | tile 0 ................ | tile 1 ......... | tile 2 ....... |
//   runs      | run       | run         | run      | run   | run            |
//                         ^ a write in the midst   ^
class StateRows {
 public:
  static constexpr size_t kTileRows = 64;
  static constexpr int64_t kMaxRows = int64_t{1} << 24;

  // Rows without a write between them: the state is taken from one cell and left in another.
  struct Run {
    size_t first;  // of all rows
    size_t count;
    const std::byte* from;  // null: zeros
    std::byte* to;
    bool written;  // true where a write was asked for, false where only the next run reads it
  };
  // The rows of one segment in a tile.
  struct Part {
    size_t segment_first;  // the segment's first row, of all rows
    const std::byte* read;  // its cell; null: zeros
    size_t first;
    size_t count;
    std::vector<Run> runs;
  };
  struct Tile {
    size_t first;
    size_t count;
    std::vector<Part> parts;
  };

  // memories: where all cells lie; they are kept alive. Throws std::out_of_range where an address
  // lies in none of them or rows are too many, std::invalid_argument where writes do not ascend to
  // the segment's count.
  StateRows(
      const std::vector<StateSegment>& segments,
      std::vector<std::shared_ptr<StateMemory>> memories);

  size_t size() const { return rows_; }
  const std::vector<Tile>& tiles() const { return tiles_; }

  // Throws std::out_of_range unless every cell has `bytes` behind the offset.
  void require_room(int64_t offset, size_t bytes) const;

 private:
  std::byte* cell(int64_t address);
  void add(const StateSegment& segment);
  void add_run(size_t segment_first, const std::byte* read, const Run& run);

  std::vector<std::shared_ptr<StateMemory>> memories_;
  size_t room_;  // bytes from a cell to the end of its memory, at least
  size_t rows_ = 0;
  std::vector<Tile> tiles_;
};

}  // namespace quire
