#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/address_range.h"
#include "core/copy_counter.h"
#include "core/heap.h"
#include "core/mapper.h"
#include "core/row_table.h"
#include "core/state_rows.h"
#include "ops/gated_delta.h"
#include "ops/ops.h"
#include "ops/packed_linear.h"
#include "ops/rope.h"
#include "python_int.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace quire {

// Python holds native objects through these. nanobind could hand out shared_ptrs of its own, but
// they end in Python, and primitives let go of theirs on MLX's threads, without the interpreter's
// lock.
template <class T>
struct Handle {
  std::shared_ptr<T> object;
};
using HeapHandle = Handle<Heap>;
using RangeHandle = Handle<AddressRange>;
using MapperHandle = Handle<Mapper>;
using RowsHandle = Handle<const RowTable>;
using WorkersHandle = Handle<ops::CpuWorkers>;
using PackedHandle = Handle<const ops::PackedLinear>;
using ExpertsHandle = Handle<const ops::PackedExperts>;
using CounterHandle = Handle<CopyCounter>;
using RopeHandle = Handle<const ops::RopeTable>;
using StatesHandle = Handle<StateMemory>;
using StateRowsHandle = Handle<const StateRows>;
using DeltaHandle = Handle<const ops::GatedDelta>;
using SegmentTuple = std::tuple<RangeHandle, PythonInt, PythonInt>;

inline std::vector<Segment> native_segments(const std::vector<SegmentTuple>& segments) {
  std::vector<Segment> native;
  for (const auto& [range, start, count] : segments) {
    native.push_back({range.object, start, count});
  }
  return native;
}

// Weights of queries and of keys, and eps.
using NormsTuple = std::tuple<mx::array, mx::array, double>;

inline std::optional<ops::QKNorms> native_norms(const std::optional<NormsTuple>& norms) {
  return norms ? std::optional(std::make_from_tuple<ops::QKNorms>(*norms)) : std::nullopt;
}

// What recurrent layers need: memory of cells, and the operations on them.
void bind_states(nb::module_& m);
// Everything that a build with Metal has beside the rest.
void bind_metal(nb::module_& m);

}  // namespace quire
