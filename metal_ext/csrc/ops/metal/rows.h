#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "core/metal/slots.h"
#include "core/row_table.h"
#include "mlx/array.h"
#include "ops/metal/encoder.h"

// The rows (tokens) of a step on a GPU, and the state slots that they use.
namespace quire::ops {

// The division of decode_attention()'s rows into tasks for the kernels.
struct DecodeCut {
  mx::array tasks;       // DecodeTask [count]
  mx::array first_task;  // uint32 [rows + 1]
  size_t count;
  bool combines;         // whether a row has several tasks
};

// The rows of one step on a GPU, made once for all layers. The constructor starts the step. The
// rows' memory stays mapped until the step has completed.
class MetalRows {
 public:
  // Throws what RowTable throws, and std::logic_error if a row would be written in a sealed block.
  MetalRows(std::shared_ptr<MetalKVBackend> kv_backend, std::vector<Segment> segments);

  const RowTable& table() const { return table_; }
  size_t size() const { return table_.rows().size(); }
  const std::shared_ptr<MetalKVBackend>& kv_backend() const { return kv_backend_; }
  // Returns the index of a segment's first row in the table.
  size_t first_row(size_t segment) const { return first_rows_[segment]; }

  uint64_t epoch() const { return epoch_; }
  // Throws std::logic_error with the operation's name if the step has ended.
  void require_open(const char* operation) const;
  // Notes that the step's end is in the graph. No operation may be added afterwards. Throws
  // std::logic_error if called twice, or if an older step's end is not in the graph.
  void close();
  // Notes that the step's end is encoded. Commands after it are refused: memory may be reused.
  void end() { ended_ = true; }
  void require_not_ended(const char* operation) const;
  // Counts a failed step as complete. Callers must know that none of its commands will still run.
  void abandon();

  // Returns RowEntry [buffer][row], an input of every operation over the rows. MLX keeps inputs
  // until they have been used, and this array keeps the step's memory alive.
  const mx::array& entries() const { return entries_; }
  int64_t entries_offset(size_t buffer) const;  // in bytes
  // Returns the GPU addresses of blocks if memory is paged, else an array that nothing reads.
  const mx::array& pages() const { return pages_; }
  // Returns the buffers that views may show while the step writes to them, each as an array of one
  // element. Sparse: those of ranges with several rows. Dense: the only one. Paged: none.
  const std::vector<mx::array>& written(size_t buffer) const { return written_[buffer]; }
  // Returns the tasks of `count` rows of the table, from `first` on, that see a window (0 for all).
  // Keeps them for the next layer.
  const DecodeCut& decode_cut(size_t first, size_t count, uint32_t window);

 private:
  void use_ranges();
  void find_written();
  void find_entries();

  const std::shared_ptr<MetalKVBackend> kv_backend_;
  const RowTable table_;
  const uint64_t epoch_;
  bool closed_ = false;
  bool ended_ = false;
  std::vector<size_t> first_rows_;
  mx::array entries_;
  mx::array pages_;
  std::vector<std::vector<mx::array>> written_;
  std::map<std::tuple<size_t, size_t, uint32_t>, DecodeCut> cuts_;
};

// Throws std::invalid_argument unless the rows belong to this backend.
void check_kv_backend_of(
    const MetalRows& rows, const std::shared_ptr<MetalKVBackend>& kv_backend);
// Calls check_kv_backend_of(), and throws std::logic_error if the rows' step has ended.
void check_rows_of(
    const char* operation, const MetalRows& rows,
    const std::shared_ptr<MetalKVBackend>& kv_backend);

// The state slots that a step's rows read and write on a GPU, for all recurrent layers. Recurrent
// layers may have more rows than the step: tokens of earlier steps whose states are not kept yet.
class MetalStateRows {
 public:
  // Throws what Slots::use() throws.
  MetalStateRows(
      std::shared_ptr<MetalRows> rows, const std::vector<metal::SlotSegment>& segments);

  const std::shared_ptr<MetalRows>& rows() const { return rows_; }
  size_t size() const { return size_; }
  uint32_t segments() const { return segments_; }
  // Throws std::out_of_range unless a slot has `bytes` bytes after the offset.
  void require_room(int64_t offset, size_t bytes) const;

  // begun() returns the DeltaSegments, and written() the DeltaWrites of all segments. begun() is an
  // input of every operation over the rows: MLX keeps it alive, and it keeps the backend alive.
  const mx::array& begun() const { return begun_; }
  const mx::array& written() const { return written_; }
  // Returns an array of the buffer with all slots, for kernels to bind, if memory is dense.
  const std::optional<mx::array>& arena() const { return arena_; }

 private:
  const metal::Slots& slots() const { return *rows_->kv_backend()->memory->slots(); }

  const std::shared_ptr<MetalRows> rows_;
  size_t size_ = 0;
  uint32_t segments_ = 0;
  mx::array begun_;
  mx::array written_;
  std::optional<mx::array> arena_;
};

using DeviceRows = std::shared_ptr<MetalRows>;
using DeviceStateRows = std::shared_ptr<const MetalStateRows>;

}  // namespace quire::ops
