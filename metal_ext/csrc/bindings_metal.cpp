#include <bit>
#include <chrono>
#include <set>
#include <stdexcept>
#include <utility>

#include "bindings.h"
#include "core/checked.h"
#include "core/metal/capabilities.h"
#include "ops/metal/on_device.h"
#include "ops/metal/ops.h"

using namespace nb::literals;

namespace quire {
namespace {

using SubstrateHandle = Handle<ops::MetalSubstrate>;
using DeviceRowsHandle = Handle<ops::MetalRows>;
using DeviceStateRowsHandle = Handle<const ops::MetalStateRows>;
using CellWrites = std::vector<std::tuple<PythonInt, PythonInt>>;
using CellTuple = std::tuple<PythonInt, std::optional<PythonInt>, CellWrites>;

constexpr double kMaxTimeoutSeconds = 3600.0;
constexpr double kMaxKeepSeconds = 86400.0;
constexpr int64_t kMaxRanges = int64_t{1} << 20;
constexpr int64_t kMaxCells = int64_t{1} << 20;

std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(seconds));
}

nb::dict capabilities() {
  nb::dict found;
  MTL::Device* const device = ops::mlx_device();
  if (device == nullptr) {
    return found;
  }
  const auto probed = metal::Capabilities::probe(device);
  found["name"] = probed.name;
  found["families"] = probed.families;
  found["max_buffer_bytes"] = probed.max_buffer_bytes;
  found["recommended_working_set_bytes"] = probed.recommended_working_set_bytes;
  found["unified_memory"] = probed.unified_memory;
  found["residency_sets"] = probed.residency_sets;
  if (probed.placement_sparse) {
    found["placement_sparse"] = *probed.placement_sparse;
  }
  for (const auto kind : {metal::Kind::sparse, metal::Kind::paged, metal::Kind::dense}) {
    const std::string name = std::string("missing_for_") + metal::name_of(kind);
    found[name.c_str()] = probed.missing_for(kind);
  }
  return found;
}

std::shared_ptr<ops::MetalSubstrate> make_substrate(
    const std::string& kind, const Geometry& geometry, int64_t max_ranges, double timeout_s,
    int64_t max_buffer_bytes, double residency_keep_s, bool maps_beside_steps) {
  if (!(timeout_s > 0.0 && timeout_s <= kMaxTimeoutSeconds)) {
    throw std::out_of_range("timeout_s must be greater than 0, and 3600 at most");
  }
  if (kind == metal::name_of(metal::Kind::paged) &&
      !std::has_single_bit(geometry.tokens_per_block())) {
    throw std::invalid_argument(
        "a paged block has " + std::to_string(geometry.tokens_per_block()) +
        " tokens; the kernels find tokens in blocks of a power of two");
  }
  if (!(residency_keep_s >= 0.0 && residency_keep_s <= kMaxKeepSeconds)) {
    throw std::out_of_range("residency_keep_s must be 0 or more, and 86400 at most");
  }
  const metal::Substrate::Options options{
      .kind = metal::kind_named(kind),
      .geometry = geometry,
      .max_ranges = checked_between("max_ranges", max_ranges, 1, kMaxRanges),
      .maps_beside_steps = maps_beside_steps,
      .max_buffer_bytes =
          checked_between("max_buffer_bytes", max_buffer_bytes, 0, INT64_MAX),
      .timeout = nanoseconds(timeout_s),
      .residency = {.keep = nanoseconds(residency_keep_s)}};
  MTL::Device* const device = ops::mlx_device();
  if (device == nullptr) {
    throw std::runtime_error("there is no Metal device: run on the CPU");
  }
  auto made = std::make_shared<ops::MetalSubstrate>();
  made->memory = metal::Substrate::make(NS::RetainPtr(device), options);
  return made;
}

// The buffers of arrays, each once. Arrays of a few bytes lie in a heap of MLX's and stay aside.
void hold(const SubstrateHandle& substrate, const std::vector<mx::array>& arrays) {
  std::vector<NS::SharedPtr<MTL::Buffer>> buffers;
  std::set<MTL::Buffer*> seen;
  for (const mx::array& array : arrays) {
    if (array.size() == 0) {
      continue;
    }
    if (!array.is_available()) {
      throw std::invalid_argument("an array can be held when it has been evaluated");
    }
    MTL::Buffer* const buffer = ops::metal_buffer(array);
    if (buffer->heap() == nullptr && seen.insert(buffer).second) {
      buffers.push_back(NS::RetainPtr(buffer));
    }
  }
  const nb::gil_scoped_release unlocked;
  substrate.object->memory->hold(std::move(buffers));
}

DeviceRowsHandle make_rows(
    const SubstrateHandle& substrate, const std::vector<SegmentTuple>& segments) {
  if (substrate.object->memory->lapsed()) {
    const nb::gil_scoped_release unlocked;  // the system may have to read weights back
    substrate.object->memory->refresh();
  }
  return {std::make_shared<ops::MetalRows>(substrate.object, native_segments(segments))};
}

DeviceStateRowsHandle make_state_rows(
    const SubstrateHandle& substrate, const DeviceRowsHandle& rows,
    const std::vector<CellTuple>& segments) {
  const auto cell = [](int64_t number) { return checked_between("cell", number, 0, kMaxCells); };
  const auto row_count = [](const char* name, int64_t count) {
    return checked_between(name, count, 1, StateRows::kMaxRows);
  };
  std::vector<metal::CellSegment> native;
  for (const auto& [count, read, writes] : segments) {
    native.push_back({row_count("count", count), std::nullopt, {}});
    if (read) {
      native.back().read = cell(*read);
    }
    for (const auto& [after, to] : writes) {
      native.back().writes.push_back({row_count("rows", after), cell(to)});
    }
  }
  ops::check_substrate_of(*rows.object, substrate.object);
  return {std::make_shared<const ops::MetalStateRows>(rows.object, native)};
}

void bind_cells(nb::module_& m, nb::class_<SubstrateHandle>& substrate) {
  nb::class_<DeviceStateRowsHandle>(m, "MetalStateRows");
  substrate
      .def("make_cells", [](const SubstrateHandle& s, PythonInt count, PythonInt cell_bytes) {
        const size_t cells = checked_between("count", count, 1, kMaxCells);
        const size_t bytes = checked_between("cell_bytes", cell_bytes, 1, StateMemory::kMaxBytes);
        const nb::gil_scoped_release unlocked;  // the system fills buffers with zeros
        s.object->memory->make_cells(cells, bytes);
      }, "count"_a, "cell_bytes"_a)
      .def("state_rows", &make_state_rows, "rows"_a, "segments"_a);
}

void bind_substrate(nb::module_& m) {
  nb::class_<DeviceRowsHandle>(m, "MetalRows")
      .def("__len__", [](const DeviceRowsHandle& r) { return r.object->size(); })
      .def_prop_ro("epoch", [](const DeviceRowsHandle& r) { return r.object->epoch(); });

  nb::class_<SubstrateHandle> substrate(m, "MetalSubstrate");
  substrate
      .def("__init__", [](SubstrateHandle* self, const std::string& kind,
                          const Geometry& geometry, PythonInt max_ranges, double timeout_s,
                          PythonInt max_buffer_bytes, double residency_keep_s,
                          bool maps_beside_steps) {
        new (self) SubstrateHandle{make_substrate(
            kind, geometry, max_ranges, timeout_s, max_buffer_bytes, residency_keep_s,
            maps_beside_steps)};
      }, "kind"_a, "geometry"_a, "max_ranges"_a, "timeout_s"_a = 30.0, "max_buffer_bytes"_a = 0,
         "residency_keep_s"_a = 0.0, "maps_beside_steps"_a = false)
      .def("hold", &hold, "arrays"_a)
      // The system fills heaps with zeros: that takes its time.
      .def("new_heap", [](const SubstrateHandle& s) {
        return HeapHandle{s.object->memory->new_heap()};
      }, nb::call_guard<nb::gil_scoped_release>())
      .def("new_range", [](const SubstrateHandle& s) {
        return RangeHandle{s.object->memory->new_range()};
      }, nb::call_guard<nb::gil_scoped_release>())
      .def("rows", &make_rows, "segments"_a)
      .def("finish_mappings", [](const SubstrateHandle& s, const MapperHandle& mapper) {
        return mapper.object->submit([made = s.object] { made->memory->finish_mappings(); });
      }, "mapper"_a)
      .def("commit_heap", [](const SubstrateHandle& s, const MapperHandle& mapper,
                             const HeapHandle& heap) {
        return mapper.object->attempt([made = s.object, heap = heap.object] {
          made->memory->commit(*heap); });
      }, "mapper"_a, "heap"_a)
      .def("copy_block", [](const SubstrateHandle& s, const MapperHandle& mapper,
                            const RangeHandle& source, PythonInt source_block,
                            const RangeHandle& target, PythonInt target_block, PythonInt tokens,
                            const CounterHandle& counter) {
        return ops::copy_block(*mapper.object, source.object, source_block, target.object,
                               target_block, tokens, counter.object, s.object);
      }, "mapper"_a, "source"_a, "source_block"_a, "target"_a, "target_block"_a, "tokens"_a,
         "counter"_a)
      .def("abandon", [](const SubstrateHandle& s, const DeviceRowsHandle& rows) {
        ops::check_substrate_of(*rows.object, s.object);
        rows.object->abandon();
      }, "rows"_a)
      .def_prop_ro("completed_epoch", [](const SubstrateHandle& s) {
        return s.object->memory->epochs().completed(); })
      .def_prop_ro("buffers_per_range", [](const SubstrateHandle& s) {
        return s.object->memory->buffers_per_range(); })
      .def_prop_ro("failure", [](const SubstrateHandle& s) {
        return s.object->memory->failure(); })
      .def("shutdown", [](const SubstrateHandle& s) {
        const nb::gil_scoped_release unlocked;
        return s.object->memory->shutdown();
      });
  bind_cells(m, substrate);
}

void bind_overloads(nb::module_& m) {
  m.def("append", [](const mx::array& token, const mx::array& keys, const mx::array& values,
                     const DeviceRowsHandle& rows, const ops::Layer& layer,
                     const SubstrateHandle& workers) {
    return ops::append(token, keys, values, rows.object, layer, workers.object);
  }, "token"_a, "keys"_a, "values"_a, "rows"_a, "layer"_a, "workers"_a);
  m.def("decode_attention", [](const mx::array& token, const mx::array& queries,
                               const DeviceRowsHandle& rows, PythonInt first_row,
                               const ops::Layer& layer, PythonInt kv_heads, double scale,
                               const SubstrateHandle& workers) {
    return ops::decode_attention(token, queries, rows.object, first_row, layer, kv_heads, scale,
                                 workers.object);
  }, "token"_a, "queries"_a, "rows"_a, "first_row"_a, "layer"_a, "kv_heads"_a, "scale"_a,
     "workers"_a);
  m.def("region_view", [](const mx::array& token, const RangeHandle& range, PythonInt region,
                          PythonInt tokens, PythonInt kv_heads, PythonInt head_dim,
                          mx::Dtype dtype, const SubstrateHandle& substrate) {
    return ops::region_view(token, range.object, region, tokens, kv_heads, head_dim, dtype,
                            substrate.object);
  }, "token"_a, "range"_a, "region"_a, "tokens"_a, "kv_heads"_a, "head_dim"_a, "dtype"_a,
     "substrate"_a);
}

void bind_gated_delta(nb::module_& m) {
  m.def("gated_delta", [](const mx::array& token, const mx::array& qkv, const mx::array& z,
                          const mx::array& a, const mx::array& b, const DeltaHandle& delta,
                          const DeviceStateRowsHandle& rows, PythonInt offset,
                          const SubstrateHandle& workers) {
    return ops::gated_delta(token, qkv, z, a, b, delta.object, rows.object, offset,
                            workers.object);
  }, "token"_a, "qkv"_a, "z"_a, "a"_a, "b"_a, "delta"_a, "rows"_a, "offset"_a, "workers"_a);
}

void bind_device_operations(nb::module_& m) {
  m.def("project_append", [](const mx::array& token, const mx::array& queries,
                             const mx::array& keys, const mx::array& values,
                             const std::optional<NormsTuple>& norms,
                             const std::optional<RopeHandle>& rope, const DeviceRowsHandle& rows,
                             const ops::Layer& layer, const SubstrateHandle& substrate) {
    return ops::project_append(token, queries, keys, values, native_norms(norms),
                               rope ? rope->object.get() : nullptr, rows.object, layer,
                               substrate.object);
  }, "token"_a, "queries"_a, "keys"_a, "values"_a, "norms"_a.none(), "rope"_a.none(), "rows"_a,
     "layer"_a, "substrate"_a);
  m.def("gather", [](const mx::array& token, const DeviceRowsHandle& rows, PythonInt segment,
                     PythonInt tokens, const ops::Layer& layer, PythonInt kv_heads,
                     PythonInt head_dim, const SubstrateHandle& substrate) {
    return ops::gather(token, rows.object, segment, tokens, layer, kv_heads, head_dim,
                       substrate.object);
  }, "token"_a, "rows"_a, "segment"_a, "tokens"_a, "layer"_a, "kv_heads"_a, "head_dim"_a,
     "substrate"_a);
  m.def("swiglu", &ops::swiglu, "gate"_a, "up"_a);
  m.def("step_end", [](const std::vector<mx::array>& arrays, const DeviceRowsHandle& rows,
                       const SubstrateHandle& substrate) {
    return ops::step_end(arrays, rows.object, substrate.object);
  }, "arrays"_a, "rows"_a, "substrate"_a);
}

}  // namespace

void bind_metal(nb::module_& m) {
  m.attr("HAS_METAL") = true;
  m.def("metal_capabilities", &capabilities);
  bind_substrate(m);
  bind_overloads(m);
  bind_gated_delta(m);
  bind_device_operations(m);
}

}  // namespace quire
