#include "bindings.h"

#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

#include "core/checked.h"
#include "core/posix_memory.h"
#include "cpu/dispatch.h"
#include "mlx/version.h"
#include "ops/checks.h"
#include "ops/gated_delta.h"
#include "ops/layers.h"

using namespace nb::literals;

// Binds to Python what every build has: memory of the CPU, and operations on a CPU.
namespace quire {
namespace {

constexpr int64_t kMaxTicket = INT64_MAX - 1;
constexpr double kMaxWaitSeconds = 3600.0;

void translate_system_error(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const std::system_error& caught) {
    nb::object value = nb::make_tuple(caught.code().value(), caught.what());
    PyErr_SetObject(PyExc_OSError, value.ptr());
  }
}

template <Direction direction>
uint32_t move_block(const RangePointer& range, int64_t block, int64_t fd, int64_t offset) {
  return range->move_block(direction, block, fd, offset);
}

template <Direction direction>
uint32_t move_states(
    const std::shared_ptr<StateMemory>& memory, int64_t offset, int64_t bytes, int64_t fd,
    int64_t file_offset) {
  return memory->move(direction, offset, bytes, fd, file_offset);
}

void bind_memory(nb::module_& m) {
  nb::class_<Geometry>(m, "Geometry")
      .def(nb::init<int64_t, int64_t, int64_t, int64_t, const std::vector<int64_t>&, int64_t>(),
           nb::kw_only(), "page_bytes"_a, "tokens_per_block"_a, "blocks_per_heap"_a,
           "blocks_per_range"_a, "region_row_bytes"_a, "ring_blocks"_a = 0);

  nb::class_<Handle<Heap>>(m, "Heap")
      .def_static("shared", [](const Geometry& g) -> HeapPointer {
        return std::make_shared<SharedHeap>(g); }, "geometry"_a)
      .def_static("dense", [](const Geometry& g) -> HeapPointer {
        return std::make_shared<DenseHeap>(g); }, "geometry"_a)
      .def_prop_ro("committed_bytes", held(&Heap::committed_bytes));

  nb::class_<Handle<AddressRange>>(m, "AddressRange")
      .def_static("sparse", [](const Geometry& g) -> RangePointer {
        return std::make_shared<SparseRange>(g); }, "geometry"_a)
      .def_static("dense", [](const Geometry& g) -> RangePointer {
        return std::make_shared<DenseRange>(g); }, "geometry"_a)
      .def("map", [](const RangePointer& range, const HeapPointer& heap, int64_t heap_block,
                     int64_t block, int64_t count, bool writable) {
        ops::check_on_host(*range);
        range->map(heap, heap_block, block, count, writable);
      }, "heap"_a, "heap_block"_a, "block"_a, "count"_a, "writable"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("write_block", &move_block<Direction::to_file>, "block"_a, "fd"_a, "offset"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("read_block", &move_block<Direction::from_file>, "block"_a, "fd"_a, "offset"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("mapped_tokens", held(&AddressRange::mapped_tokens))
      .def_prop_ro("base_address", [](const RangePointer& range) {
        return reinterpret_cast<uintptr_t>(range->region(0)); });

  nb::class_<Handle<Mapper>>(m, "Mapper")
      .def("__init__", &construct<Mapper>)
      .def("map", [](const MapperPointer& mapper, const RangePointer& range,
                     const HeapPointer& heap, int64_t heap_block, int64_t block, int64_t count,
                     bool writable) {
        range->check_map(*heap, heap_block, block, count);
        return mapper->attempt([=] {
          if (writable) {
            range->map_committed(heap, heap_block, block, count);
          } else {
            range->map(heap, heap_block, block, count, false);
          }
        });
      }, "range"_a, "heap"_a, "heap_block"_a, "block"_a, "count"_a, "writable"_a)
      .def("unmap", [](const MapperPointer& mapper, const RangePointer& range, int64_t block,
                       int64_t count) {
        checked_run("range blocks", block, count, range->geometry().blocks_per_range());
        return mapper->submit([=] { range->unmap(block, count); });
      }, "range"_a, "block"_a, "count"_a)
      .def("release", [](const MapperPointer& mapper, const HeapPointer& heap, int64_t block,
                         int64_t count) {
        checked_run("heap blocks", block, count, heap->geometry().blocks_per_heap());
        return mapper->submit([=] { heap->release(block, count); });
      }, "heap"_a, "block"_a, "count"_a)
      .def_prop_ro("completed", held(&Mapper::completed))
      .def_prop_ro("failure", held(&Mapper::failure))
      .def("refused", [](const MapperPointer& mapper, int64_t ticket) {
        return mapper->refused(checked_between("ticket", ticket, 1, kMaxTicket));
      }, "ticket"_a)
      .def("wait", [](const MapperPointer& mapper, int64_t ticket, double timeout_s) {
        const uint64_t number = checked_between("ticket", ticket, 0, kMaxTicket);
        require<std::out_of_range>(timeout_s >= 0.0 && timeout_s <= kMaxWaitSeconds,
                                   "timeout_s must lie between 0 and 3600");
        const auto timeout = std::chrono::duration<double>(timeout_s);
        return mapper->wait(number, std::chrono::duration_cast<std::chrono::nanoseconds>(timeout));
      }, "ticket"_a, "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Handle<ops::CopyCounter>>(m, "CopyCounter")
      .def("__init__", &construct<ops::CopyCounter>)
      .def_prop_ro("bytes", held(&ops::CopyCounter::bytes));
}

void bind_rows(nb::module_& m) {
  nb::class_<Handle<ops::CpuWorkers>>(m, "CpuWorkers")
      .def("__init__", &construct<ops::CpuWorkers, int64_t, std::string, std::string>,
           "threads"_a, "instruction_set"_a = "auto", "activations"_a = "float32")
      .def_prop_ro("threads", [](const ops::Workers& w) { return w->pool.threads(); })
      .def_prop_ro("instruction_set", [](const ops::Workers& w) {
        return std::string(w->kernels.name); });

  nb::class_<Handle<RowTable>>(m, "RowTable")
      .def("__init__", [](Handle<RowTable>* self, const std::vector<Segment>& segments) {
        for (const Segment& segment : segments) {
          ops::check_on_host(*segment.range);
        }
        construct<RowTable>(self, segments);
      }, "segments"_a)
      .def("__len__", [](const ops::Rows& rows) { return rows->rows().size(); });

  nb::class_<ops::Layer>(m, "Layer")
      .def("__init__", [](ops::Layer* self, int64_t key_region, int64_t value_region,
                          mx::Dtype type) {
        new (self) ops::Layer{key_region, value_region, type};
      }, "key_region"_a, "value_region"_a, "dtype"_a);

  nb::class_<ops::Softmax>(m, "Softmax")
      .def(nb::init<double, std::optional<int64_t>, double, std::optional<mx::array>>(),
           "scale"_a, nb::kw_only(), "window"_a.none() = nb::none(), "softcap"_a = 0.0,
           "sinks"_a.none() = nb::none())
      .def_ro("scale", &ops::Softmax::scale)
      .def_prop_ro("window", [](const ops::Softmax& its) {
        return its.window == SIZE_MAX ? std::nullopt : std::optional(its.window); })
      .def_ro("softcap", &ops::Softmax::softcap)
      .def_ro("sinks", &ops::Softmax::sinks);

  nb::class_<Handle<ops::RopeTable>>(m, "RopeTable")
      .def("__init__", &construct<ops::RopeTable, std::vector<double>, double>, "frequencies"_a,
           "magnitude"_a = 1.0);

  m.def("append", &ops::append, "token"_a, "keys"_a, "values"_a, "rows"_a, "layer"_a, "workers"_a);
  m.def("rope_angles", &ops::rope_angles, "rows"_a, "rope"_a, "workers"_a);
  m.def("project_append", &ops::project_append, "token"_a, "queries"_a, "keys"_a, "values"_a,
        "norms"_a.none(), "angles"_a.none(), "rows"_a, "layer"_a, "workers"_a);
  m.def("decode_attention", &ops::decode_attention, "token"_a, "queries"_a, "rows"_a,
        "first_row"_a, "layer"_a, "kv_heads"_a, "softmax"_a, "workers"_a);
  m.def("chunk_attention", &ops::chunk_attention, "token"_a, "queries"_a, "rows"_a, "segment"_a,
        "layer"_a, "kv_heads"_a, "softmax"_a, "workers"_a);
  m.def("region_view", [](const mx::array& token, const RangePointer& range, int64_t region,
                          int64_t tokens, int64_t kv_heads, int64_t head_dim, mx::Dtype dtype,
                          nb::handle kv_backend, int64_t first) {
    if (!kv_backend.is_none()) {
      throw nb::next_overload();
    }
    return ops::region_view(token, range, region, tokens, kv_heads, head_dim, dtype, first);
  }, "token"_a, "range"_a, "region"_a, "tokens"_a, "kv_heads"_a, "head_dim"_a, "dtype"_a,
     "kv_backend"_a.none() = nb::none(), "first"_a = 0);
  m.def("uncounted", &ops::uncounted, "array"_a, nb::kw_only(), "transposable"_a);
  m.def("block_copy", &ops::block_copy, "token"_a, "source"_a, "source_block"_a, "target"_a,
        "target_block"_a, "tokens"_a, "counter"_a);
}

void bind_states(nb::module_& m) {
  nb::class_<Handle<StateMemory>>(m, "StateMemory")
      .def("__init__", &construct<StateMemory, int64_t>, "bytes"_a)
      .def_prop_ro("address", [](const std::shared_ptr<StateMemory>& memory) {
        return reinterpret_cast<uintptr_t>(memory->address()); })
      .def_prop_ro("bytes", held(&StateMemory::bytes))
      .def("release", held(&StateMemory::release), "offset"_a, "bytes"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("committed", held(&StateMemory::committed), "offset"_a, "bytes"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("write_record", &move_states<Direction::to_file>, "offset"_a, "bytes"_a, "fd"_a,
           "file_offset"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("read_record", &move_states<Direction::from_file>, "offset"_a, "bytes"_a, "fd"_a,
           "file_offset"_a, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Handle<StateRows>>(m, "StateRows")
      .def("__init__", &construct<StateRows, std::vector<StateSegment>,
                                  std::vector<std::shared_ptr<StateMemory>>>,
           "segments"_a, "memories"_a)
      .def("__len__", held(&StateRows::size));

  nb::class_<Handle<ops::GatedDelta>>(m, "GatedDelta")
      .def("__init__", [](Handle<ops::GatedDelta>* self, int64_t key_heads, int64_t value_heads,
                          int64_t key_dim, int64_t value_dim, const mx::array& conv,
                          const mx::array& a_log, const mx::array& dt_bias, const mx::array& norm,
                          double eps) {
        const int64_t tail_rows = conv.ndim() == 2 ? conv.shape(0) - 1 : 0;
        construct(self, ops::DeltaShape(value_heads, key_heads, key_dim, value_dim, tail_rows),
                  conv, a_log, dt_bias, norm, eps);
      }, nb::kw_only(), "key_heads"_a, "value_heads"_a, "key_dim"_a, "value_dim"_a, "conv"_a,
         "a_log"_a, "dt_bias"_a, "norm"_a, "eps"_a);
  m.def("gated_delta", &ops::gated_delta, "token"_a, "qkv"_a, "z"_a, "a"_a, "b"_a, "delta"_a,
        "rows"_a, "offset"_a, "workers"_a);
}

void bind_layers(nb::module_& m) {
  nb::class_<Handle<ops::PackedLinear>>(m, "PackedLinear")
      .def("__init__", [](Handle<ops::PackedLinear>* self, const std::vector<mx::array>& weights,
                          const ops::Workers& workers, const ops::Codes& codes, bool exact) {
        new (self) Handle{ops::pack_linear(weights, codes, workers, exact)};
      }, "weights"_a, "workers"_a, "codes"_a, "exact"_a = false)
      .def_prop_ro("outputs", [](const ops::Packed& p) { return p->shape().outputs; })
      .def_prop_ro("inputs", [](const ops::Packed& p) { return p->shape().inputs; })
      .def_prop_ro("nbytes", [](const ops::Packed& p) { return p->packed_bytes(); });
  nb::class_<Handle<ops::PackedExperts>>(m, "PackedExperts")
      .def("__init__", [](Handle<ops::PackedExperts>* self, const std::vector<mx::array>& weights,
                          const ops::Workers& workers, const ops::Codes& codes) {
        new (self) Handle{ops::pack_experts(weights, codes, workers)};
      }, "weights"_a, "workers"_a, "codes"_a)
      .def_prop_ro("nbytes", [](const ops::PackedStack& p) { return p->packed_bytes(); });
  m.def("packed_bytes", &ops::packed_bytes, "inputs"_a, "matrices"_a);
  m.def("linear", &ops::linear, "x"_a, "packed"_a, "workers"_a, nb::kw_only(),
        "norm"_a = nb::none(), "eps"_a = 0.0, "residual"_a = nb::none());
  m.def("linear_heads", &ops::linear_heads, "x"_a, "packed"_a, "workers"_a, "heads"_a,
        nb::kw_only(), "norm"_a = nb::none(), "eps"_a = 0.0, "residual"_a = nb::none());
  m.def("gated_mlp", &ops::gated_mlp, "x"_a, "norm"_a, "eps"_a, "gate_up"_a, "down"_a,
        "workers"_a, nb::kw_only(), "gate"_a = "silu", "adds"_a = true);
  m.def("mixture_mlp", &ops::mixture_mlp, "x"_a, "norm"_a, "eps"_a, "router"_a, "gate_up"_a,
        "down"_a, "chosen"_a, "normalised"_a, "shared"_a.none(), "workers"_a,
        nb::kw_only(), "gate"_a = "silu", "biases"_a.none() = nb::none());
  m.def("rms_norm", &ops::rms_norm, "x"_a, "weight"_a, "eps"_a, "workers"_a, nb::kw_only(),
        "residual"_a.none() = nb::none());
  m.def("choose_tokens", &ops::choose_tokens, "raw"_a, "adjusted"_a, "choices"_a,
        "noise_keys"_a, "noise"_a, "workers"_a);
  m.def("packed_rows", &ops::packed_rows, "ids"_a, "packed"_a, "workers"_a);
}

}  // namespace
}  // namespace quire

NB_MODULE(_ext, m) {
  nb::module_::import_("mlx.core");  // registers mx.array, an argument and result of the operations
  nb::register_exception_translator(quire::translate_system_error);
  m.attr("MLX_VERSION") =
      quire::message(MLX_VERSION_MAJOR, ".", MLX_VERSION_MINOR, ".", MLX_VERSION_PATCH);
  m.attr("SYSTEM_PAGE_BYTES") = quire::system_page_bytes();
  m.def("instruction_sets", &quire::cpu::available);
  quire::bind_memory(m);
  quire::bind_rows(m);
  quire::bind_layers(m);
  quire::bind_states(m);
#ifdef QUIRE_METAL
  quire::bind_metal(m);
#else
  m.attr("HAS_METAL") = false;
#endif
}
