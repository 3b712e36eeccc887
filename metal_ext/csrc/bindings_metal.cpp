#include <bit>
#include <chrono>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/checked.h"
#include "core/metal/gpu.h"
#include "ops/metal/on_device.h"
#include "ops/metal/ops.h"

using namespace nb::literals;

// Binds to Python what a build with Metal adds: memory of a GPU, and operations on a GPU.
namespace quire {
namespace {

using ops::DeviceMemory;
using ops::DeviceRows;
using SlotWrites = std::vector<std::tuple<int64_t, int64_t>>;
using SlotTuple = std::tuple<int64_t, std::optional<int64_t>, SlotWrites>;

constexpr double kMaxTimeoutSeconds = 3600.0;
constexpr double kMaxKeepSeconds = 86400.0;
constexpr int64_t kMaxRanges = int64_t{1} << 20;
constexpr int64_t kMaxSlots = int64_t{1} << 20;

std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(seconds));
}

nb::dict capabilities() {
  nb::dict answers;
  MTL::Device* const device = ops::mlx_device();
  if (device == nullptr) {
    return answers;
  }
  const auto probed = metal::Capabilities::probe(device);
  answers["name"] = probed.name;
  answers["families"] = probed.families;
  answers["max_buffer_bytes"] = probed.max_buffer_bytes;
  answers["recommended_working_set_bytes"] = probed.recommended_working_set_bytes;
  answers["unified_memory"] = probed.unified_memory;
  answers["residency_sets"] = probed.residency_sets;
  if (probed.placement_sparse) {
    answers["placement_sparse"] = *probed.placement_sparse;
  }
  for (const auto kind : {metal::Kind::sparse, metal::Kind::paged, metal::Kind::dense}) {
    const std::string name = std::string("missing_for_") + metal::name_of(kind);
    answers[name.c_str()] = probed.missing_for(kind);
  }
  return answers;
}

void make_kv_backend(
    Handle<ops::MetalKVBackend>* self, const std::string& kind, const Geometry& geometry,
    int64_t max_ranges, double timeout_s, int64_t max_buffer_bytes, double residency_keep_s,
    bool maps_beside_steps) {
  require<std::out_of_range>(timeout_s > 0.0 && timeout_s <= kMaxTimeoutSeconds,
                             "timeout_s must be greater than 0, and 3600 at most");
  require<std::invalid_argument>(
      kind != metal::name_of(metal::Kind::paged) ||
          std::has_single_bit(geometry.tokens_per_block()),
      "a paged block has ", geometry.tokens_per_block(),
      " tokens; the kernels find tokens in blocks of a power of two");
  require<std::out_of_range>(residency_keep_s >= 0.0 && residency_keep_s <= kMaxKeepSeconds,
                             "residency_keep_s must be 0 or more, and 86400 at most");
  const metal::KVBackend::Options options{
      .kind = metal::kind_named(kind),
      .geometry = geometry,
      .max_ranges = checked_between("max_ranges", max_ranges, 1, kMaxRanges),
      .maps_beside_steps = maps_beside_steps,
      .max_buffer_bytes =
          checked_between("max_buffer_bytes", max_buffer_bytes, 0, INT64_MAX),
      .timeout = nanoseconds(timeout_s),
      .residency = {.keep = nanoseconds(residency_keep_s)}};
  MTL::Device* const device = ops::mlx_device();
  require<std::runtime_error>(device != nullptr, "there is no Metal device: run on the CPU");
  auto kv_backend = std::make_shared<ops::MetalKVBackend>();
  kv_backend->memory = metal::KVBackend::make(NS::RetainPtr(device), options);
  new (self) Handle{std::move(kv_backend)};
}

// Keeps the arrays' buffers resident on the GPU. Skips small arrays, which MLX keeps in a heap.
void hold(const DeviceMemory& kv_backend, const std::vector<mx::array>& arrays) {
  std::vector<NS::SharedPtr<MTL::Buffer>> buffers;
  std::set<MTL::Buffer*> seen;
  for (const mx::array& array : arrays) {
    if (array.size() == 0) {
      continue;
    }
    require<std::invalid_argument>(
        array.is_available(), "an array can be held when it has been evaluated");
    MTL::Buffer* const buffer = ops::metal_buffer(array);
    if (buffer->heap() == nullptr && seen.insert(buffer).second) {
      buffers.push_back(NS::RetainPtr(buffer));
    }
  }
  const nb::gil_scoped_release unlocked;
  kv_backend->memory->residency().hold(std::move(buffers));
}

DeviceRows make_rows(const DeviceMemory& kv_backend, const std::vector<Segment>& segments) {
  if (metal::Residency& residency = kv_backend->memory->residency(); residency.lapsed()) {
    const nb::gil_scoped_release unlocked;  // the call may wait until weights are resident again
    residency.refresh();
  }
  return std::make_shared<ops::MetalRows>(kv_backend, segments);
}

std::shared_ptr<ops::MetalStateRows> make_state_rows(
    const DeviceMemory& kv_backend, const DeviceRows& rows,
    const std::vector<SlotTuple>& segments) {
  const auto slot = [](int64_t number) { return checked_between("slot", number, 0, kMaxSlots); };
  const auto row_count = [](const char* name, int64_t count) {
    return checked_between(name, count, 1, StateRows::kMaxRows);
  };
  std::vector<metal::SlotSegment> native;
  for (const auto& [count, read, writes] : segments) {
    native.push_back({row_count("count", count), std::nullopt, {}});
    if (read) {
      native.back().read = slot(*read);
    }
    for (const auto& [after, to] : writes) {
      native.back().writes.push_back({row_count("rows", after), slot(to)});
    }
  }
  ops::check_kv_backend_of(*rows, kv_backend);
  return std::make_shared<ops::MetalStateRows>(rows, native);
}

template <Direction direction>
uint32_t move_slot(const DeviceMemory& kv_backend, int64_t slot, int64_t fd, int64_t offset) {
  const uint64_t number = checked_between("slot", slot, 0, kMaxSlots);
  return kv_backend->memory->move_slot(direction, number, fd, offset);
}

void bind_kv_backend(nb::module_& m) {
  nb::class_<Handle<ops::MetalStateRows>>(m, "MetalStateRows");
  nb::class_<Handle<ops::MetalRows>>(m, "MetalRows")
      .def("__len__", held(&ops::MetalRows::size))
      .def_prop_ro("epoch", held(&ops::MetalRows::epoch));

  nb::class_<Handle<ops::MetalKVBackend>>(m, "MetalKVBackend")
      .def("__init__", &make_kv_backend, "kind"_a, "geometry"_a, "max_ranges"_a,
           "timeout_s"_a = 30.0, "max_buffer_bytes"_a = 0, "residency_keep_s"_a = 0.0,
           "maps_beside_steps"_a = false)
      .def("hold", &hold, "arrays"_a)
      // Runs without Python's interpreter lock, because filling new memory with zeros takes time.
      .def("new_heap", [](const DeviceMemory& s) { return s->memory->new_heap(); },
           nb::call_guard<nb::gil_scoped_release>())
      .def("new_range", [](const DeviceMemory& s) { return s->memory->new_range(); },
           nb::call_guard<nb::gil_scoped_release>())
      .def("make_slots", [](const DeviceMemory& s, int64_t count, int64_t slot_bytes) {
        s->memory->make_slots(
            checked_between("count", count, 1, kMaxSlots),
            checked_between("slot_bytes", slot_bytes, 1, StateMemory::kMaxBytes));
      }, "count"_a, "slot_bytes"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("commit_slot", [](const DeviceMemory& s, int64_t slot) {
        return s->memory->commit_slot(checked_between("slot", slot, 0, kMaxSlots));
      }, "slot"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("write_slot", &move_slot<Direction::to_file>, "slot"_a, "fd"_a, "offset"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("read_slot", &move_slot<Direction::from_file>, "slot"_a, "fd"_a, "offset"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("rows", &make_rows, "segments"_a)
      .def("state_rows", &make_state_rows, "rows"_a, "segments"_a)
      .def("finish_mappings", [](const DeviceMemory& s, const MapperPointer& mapper) {
        return mapper->submit([=] { s->memory->finish_mappings(); });
      }, "mapper"_a)
      .def("commit_heap", [](const DeviceMemory& s, const MapperPointer& mapper,
                             const HeapPointer& heap) {
        return mapper->attempt([=] { s->memory->commit(*heap); });
      }, "mapper"_a, "heap"_a)
      .def("copy_block", &ops::device::copy_block, "mapper"_a, "source"_a, "source_block"_a,
           "target"_a, "target_block"_a, "tokens"_a, "counter"_a)
      .def("abandon", [](const DeviceMemory& s, const DeviceRows& rows) {
        ops::check_kv_backend_of(*rows, s);
        rows->abandon();
      }, "rows"_a)
      .def_prop_ro("completed_epoch", [](const DeviceMemory& s) {
        return s->memory->epochs().completed(); })
      .def_prop_ro("late_signals", [](const DeviceMemory& s) {
        return s->memory->epochs().late_signals(); })
      .def_prop_ro("command_buffers", [](const DeviceMemory& s) { return s->command_buffers; })
      .def_prop_ro("buffers_per_range", [](const DeviceMemory& s) {
        return s->memory->buffers_per_range(); })
      .def_prop_ro("failure", [](const DeviceMemory& s) { return s->memory->failure(); })
      .def("shutdown", [](const DeviceMemory& s) { return s->memory->shutdown(); },
           nb::call_guard<nb::gil_scoped_release>());
}

void bind_operations(nb::module_& m) {
  using Part = std::optional<mx::array>;
  nb::class_<Handle<ops::StoredMatrix>>(m, "StoredMatrix")
      .def("__init__",
           &construct<
               ops::StoredMatrix, mx::array, Part, Part, Part, int64_t, int64_t, std::string>,
           "weight"_a, "scales"_a.none() = nb::none(), "biases"_a.none() = nb::none(),
           "bias"_a.none() = nb::none(), nb::kw_only(), "bits"_a = 0, "group_size"_a = 0,
           "mode"_a = "affine")
      .def_prop_ro("dtype", held(&ops::StoredMatrix::type));
  using Matrices = std::vector<std::shared_ptr<ops::StoredMatrix>>;
  nb::class_<Handle<ops::Mixture>>(m, "Mixture")
      .def("__init__",
           &construct<ops::Mixture, Matrices, std::shared_ptr<ops::StoredMatrix>, Matrices, int64_t,
                      bool, std::string>,
           "gate_up"_a, "down"_a, "shared"_a, nb::kw_only(), "chosen"_a, "normalised"_a,
           "kind"_a = "silu")
      .def_prop_ro("dtype", held(&ops::Mixture::activations))
      .def_prop_ro("has_shared", held(&ops::Mixture::has_shared));
  namespace device = ops::device;
  m.def("append", &device::append, "token"_a, "keys"_a, "values"_a, "rows"_a, "layer"_a,
        "workers"_a);
  m.def("decode_attention", &device::decode_attention, "token"_a, "queries"_a, "rows"_a,
        "first_row"_a, "layer"_a, "kv_heads"_a, "softmax"_a, "workers"_a);
  m.def("region_view", &device::region_view, "token"_a, "range"_a, "region"_a, "tokens"_a,
        "kv_heads"_a, "head_dim"_a, "dtype"_a, "kv_backend"_a, "first"_a = 0);
  m.def("gated_delta", &device::gated_delta, "token"_a, "qkv"_a, "z"_a, "a"_a, "b"_a, "delta"_a,
        "rows"_a, "offset"_a, "workers"_a);
  m.def("project_append", &device::project_append, "token"_a, "queries"_a, "keys"_a, "values"_a,
        "norms"_a.none(), "rope"_a.none(), "rows"_a, "layer"_a, "kv_backend"_a);
  m.def("gather", &device::gather, "token"_a, "rows"_a, "segment"_a, "first"_a, "tokens"_a,
        "layer"_a, "kv_heads"_a, "head_dim"_a, "kv_backend"_a);
  m.def("multiply", &device::multiply, "x"_a, "matrices"_a, "residual"_a.none() = nb::none());
  m.def("multiply_gated", &device::multiply_gated, "x"_a, "gate"_a, "up"_a, nb::kw_only(),
        "kind"_a = "silu");
  m.def("mixture", &device::mixture, "x"_a, "residual"_a, "logits"_a, "mixture"_a,
        "shared_gate"_a.none() = nb::none());
  m.def("step_end", &device::step_end, "arrays"_a, "rows"_a, "kv_backend"_a);
}

}  // namespace

void bind_metal(nb::module_& m) {
  m.attr("HAS_METAL") = true;
  m.def("metal_capabilities", &capabilities);
  bind_kv_backend(m);
  bind_operations(m);
}

}  // namespace quire
