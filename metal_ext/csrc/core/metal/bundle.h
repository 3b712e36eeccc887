#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "core/metal/epochs.h"

namespace quire::metal {

struct Context;
class DeviceHeap;
class SparseBufferRange;

// Blocks of a heap that are to stand behind blocks of a range.
struct Run {
  std::shared_ptr<DeviceHeap> heap;
  size_t heap_block;
  size_t block;
  size_t count;
  bool writable;
};

// Maps of sparse buffers that are made together: however many there are, the CPU waits once until
// all are there, and once more until those that are fresh hold zeros.
//
//   map | signal | map | signal | ... | CPU waits | zeros of all | CPU waits | they count as mapped
//
// Mapper's thread. Before finish() the device knows of none of them. Where memory is mapped only
// while no step is in flight, none begins from the first add() until finish() has returned.
class Bundle {
 public:
  explicit Bundle(Context& context) : context_(context) {}

  // range: which the substrate keeps.
  void add(SparseBufferRange& range, const Run& run);
  bool has(const SparseBufferRange& range) const;
  // Throws std::runtime_error where the device fails: what is mapped is in doubt then.
  void finish();
  // None of them will be made. For the substrate's end.
  void withdraw();

 private:
  Context& context_;
  std::vector<std::pair<SparseBufferRange*, Run>> maps_;
  Epochs::Pause point_;
};

}  // namespace quire::metal
