#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/metal/slots.h"
#include "core/row_table.h"
#include "mlx/array.h"
#include "ops/metal/encoder.h"

// The rows (tokens) of a step on the device, and the slots (states of recurrent layers) they use.
namespace quire::ops {

// How decode_attention() divides rows into tasks for the kernels.
struct DecodeCut {
  mx::array tasks;       // DecodeTask [count]
  mx::array first_task;  // uint32 [rows + 1]
  size_t count;
  bool combines;         // whether a row has several tasks
};

// The rows of one step on the device, made once for all layers. The constructor starts the step;
// until its epoch (number) completes, the rows' memory stays mapped.
class MetalRows {
 public:
  // Throws as RowTable does, and std::logic_error when a row would be written in a sealed block.
  MetalRows(std::shared_ptr<MetalKVBackend> kv_backend, std::vector<Segment> segments);

  const RowTable& table() const { return table_; }
  size_t size() const { return table_.rows().size(); }
  const std::shared_ptr<MetalKVBackend>& kv_backend() const { return kv_backend_; }
  // Returns the index of a segment's first row in the table.
  size_t first_row(size_t segment) const { return first_rows_[segment]; }

  uint64_t epoch() const { return epoch_; }
  // Throws std::logic_error that names the operation if the step has ended.
  void require_open(const char* operation) const;
  // Notes that the step's end is in the graph, after which no operation may be added. Throws
  // std::logic_error the second time, or while an older step has no end.
  void close();
  // Notes that the step's end is encoded: later commands might use another sequence's memory.
  void end() { ended_ = true; }
  void require_not_ended(const char* operation) const;
  // Counts the step as complete after a failure, when none of its commands runs any more.
  void abandon();

  // Returns RowEntry [buffer][row], an input of every operation over the rows: MLX keeps inputs
  // until they have been used, and this array keeps the step's memory alive.
  const mx::array& entries() const { return entries_; }
  int64_t entries_offset(size_t buffer) const;  // in bytes
  // On paged, the uint64 GPU addresses of blocks, which entries index. On other kinds, any array.
  const mx::array& pages() const { return pages_; }
  // The buffers that a view may show while the step writes them, each as an array of one element.
  // Sparse has that buffer of each range with several rows, dense the arena, paged none.
  const std::vector<mx::array>& written(size_t buffer) const { return written_[buffer]; }
  // Returns the tasks of rows [first, + count) of the table, cached for the next layer.
  const DecodeCut& decode_cut(size_t first, size_t count);

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
  std::map<std::pair<size_t, size_t>, DecodeCut> cuts_;
};

// Throws std::invalid_argument unless the rows are this backend's.
void check_kv_backend_of(
    const MetalRows& rows, const std::shared_ptr<MetalKVBackend>& kv_backend);
// Calls check_kv_backend_of(), and throws std::logic_error if the rows' step has ended.
void check_rows_of(
    const char* operation, const MetalRows& rows,
    const std::shared_ptr<MetalKVBackend>& kv_backend);

// The slots that a step's rows start from and write, on the device, for all recurrent layers.
class MetalStateRows {
 public:
  // segments: of all rows, in order (else std::invalid_argument). Throws as Slots::use() does.
  MetalStateRows(
      std::shared_ptr<MetalRows> rows, const std::vector<metal::SlotSegment>& segments);

  const std::shared_ptr<MetalRows>& rows() const { return rows_; }
  uint32_t segments() const { return segments_; }
  // Throws std::out_of_range unless a slot has `bytes` bytes after the offset.
  void require_room(int64_t offset, size_t bytes) const;

  // begun() has DeltaSegment [segments], written() has DeltaWrite of all segments. begun() is an
  // input of every operation over the rows: MLX keeps inputs alive, and begun() keeps the memory.
  const mx::array& begun() const { return begun_; }
  const mx::array& written() const { return written_; }
  // On dense, an array that stands for the slots' buffer, which kernels bind.
  const std::optional<mx::array>& arena() const { return arena_; }

 private:
  const metal::Slots& slots() const { return *rows_->kv_backend()->memory->slots(); }

  const std::shared_ptr<MetalRows> rows_;
  uint32_t segments_ = 0;
  mx::array begun_;
  mx::array written_;
  std::optional<mx::array> arena_;
};

using DeviceRows = std::shared_ptr<MetalRows>;
using DeviceStateRows = std::shared_ptr<const MetalStateRows>;

}  // namespace quire::ops
