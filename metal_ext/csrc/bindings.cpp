#include "bindings.h"

#include <chrono>
#include <system_error>

#include "core/checked.h"
#include "core/posix_memory.h"
#include "cpu/dispatch.h"
#include "mlx/version.h"
#include "ops/choose.h"
#include "ops/experts.h"
#include "ops/kv_rows.h"
#include "ops/linear.h"
#include "ops/project.h"

using namespace nb::literals;

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

void bind_memory(nb::module_& m) {
  nb::class_<Geometry>(m, "Geometry")
      .def("__init__", [](Geometry* self, PythonInt page_bytes, PythonInt tokens_per_block,
                          PythonInt blocks_per_heap, PythonInt blocks_per_range,
                          const std::vector<PythonInt>& rows) {
        const std::vector<int64_t> row_bytes(rows.begin(), rows.end());
        new (self) Geometry(page_bytes, tokens_per_block, blocks_per_heap, blocks_per_range,
                            row_bytes);
      }, nb::kw_only(), "page_bytes"_a, "tokens_per_block"_a, "blocks_per_heap"_a,
         "blocks_per_range"_a, "region_row_bytes"_a)
      .def_prop_ro("block_bytes", &Geometry::block_bytes)
      .def_prop_ro("heap_bytes", &Geometry::heap_bytes)
      .def_prop_ro("range_bytes", &Geometry::range_bytes)
      .def_prop_ro("max_tokens", &Geometry::max_tokens);

  nb::class_<HeapHandle>(m, "Heap")
      .def_static("shared", [](const Geometry& g) {
        return HeapHandle{std::make_shared<SharedHeap>(g)}; }, "geometry"_a)
      .def_static("dense", [](const Geometry& g) {
        return HeapHandle{std::make_shared<DenseHeap>(g)}; }, "geometry"_a)
      .def_prop_ro("committed_bytes", [](const HeapHandle& h) {
        return h.object->committed_bytes(); })
      .def_prop_ro("releases_blocks", [](const HeapHandle& h) {
        return h.object->releases_blocks(); });

  nb::class_<RangeHandle>(m, "AddressRange")
      .def_static("sparse", [](const Geometry& g) {
        return RangeHandle{std::make_shared<SparseRange>(g)}; }, "geometry"_a)
      .def_static("dense", [](const Geometry& g) {
        return RangeHandle{std::make_shared<DenseRange>(g)}; }, "geometry"_a)
      .def("map", [](const RangeHandle& r, const HeapHandle& heap, PythonInt heap_block,
                     PythonInt block, PythonInt count, bool writable) {
        ops::check_on_host(*r.object);
        const nb::gil_scoped_release unlocked;
        r.object->map(heap.object, heap_block, block, count, writable);
      }, "heap"_a, "heap_block"_a, "block"_a, "count"_a, "writable"_a)
      .def_prop_ro("mapped_tokens", [](const RangeHandle& r) { return r.object->mapped_tokens(); })
      .def_prop_ro("base_address", [](const RangeHandle& r) {
        return reinterpret_cast<uintptr_t>(r.object->region(0)); });

  nb::class_<MapperHandle>(m, "Mapper")
      .def("__init__", [](MapperHandle* self) {
        new (self) MapperHandle{std::make_shared<Mapper>()}; })
      .def("map", [](const MapperHandle& m, const RangeHandle& range, const HeapHandle& heap,
                     PythonInt heap_block, PythonInt block, PythonInt count, bool writable) {
        range.object->check_map(*heap.object, heap_block, block, count);
        return m.object->attempt([object = range.object, heap = heap.object, heap_block, block,
                                  count, writable] {
          if (writable) {
            object->map_committed(heap, heap_block, block, count);
          } else {
            object->map(heap, heap_block, block, count, false);
          }
        });
      }, "range"_a, "heap"_a, "heap_block"_a, "block"_a, "count"_a, "writable"_a)
      .def("unmap", [](const MapperHandle& m, const RangeHandle& range, PythonInt block,
                       PythonInt count) {
        checked_run("range blocks", block, count, range.object->geometry().blocks_per_range());
        return m.object->submit([object = range.object, block, count] {
          object->unmap(block, count); });
      }, "range"_a, "block"_a, "count"_a)
      .def("release", [](const MapperHandle& m, const HeapHandle& heap, PythonInt block,
                         PythonInt count) {
        checked_run("heap blocks", block, count, heap.object->geometry().blocks_per_heap());
        return m.object->submit([object = heap.object, block, count] {
          object->release(block, count); });
      }, "heap"_a, "block"_a, "count"_a)
      .def_prop_ro("completed", [](const MapperHandle& m) { return m.object->completed(); })
      .def_prop_ro("failure", [](const MapperHandle& m) { return m.object->failure(); })
      .def("refused", [](const MapperHandle& m, PythonInt ticket) {
        return m.object->refused(checked_between("ticket", ticket, 1, kMaxTicket));
      }, "ticket"_a)
      .def("wait", [](const MapperHandle& m, PythonInt ticket, double timeout_s) {
        checked_between("ticket", ticket, 0, kMaxTicket);
        if (!(timeout_s >= 0.0 && timeout_s <= kMaxWaitSeconds)) {
          throw std::out_of_range("timeout_s must lie between 0 and 3600");
        }
        const nb::gil_scoped_release unlocked;
        const auto timeout = std::chrono::duration<double>(timeout_s);
        return m.object->wait(static_cast<uint64_t>(ticket),
                              std::chrono::duration_cast<std::chrono::nanoseconds>(timeout));
      }, "ticket"_a, "timeout_s"_a);

  nb::class_<CounterHandle>(m, "CopyCounter")
      .def("__init__", [](CounterHandle* self) {
        new (self) CounterHandle{std::make_shared<CopyCounter>()}; })
      .def_prop_ro("bytes", [](const CounterHandle& c) { return c.object->bytes(); });
}

void bind_operations(nb::module_& m) {
  nb::class_<WorkersHandle>(m, "CpuWorkers")
      .def("__init__", [](WorkersHandle* self, PythonInt threads, const std::string& set,
                          const std::string& activations) {
        new (self) WorkersHandle{std::make_shared<ops::CpuWorkers>(threads, set, activations)};
      }, "threads"_a, "instruction_set"_a = "auto", "activations"_a = "float32")
      .def_prop_ro("threads", [](const WorkersHandle& w) { return w.object->pool.threads(); })
      .def_prop_ro("instruction_set", [](const WorkersHandle& w) {
        return std::string(w.object->kernels.name); });

  nb::class_<RowsHandle>(m, "RowTable")
      .def("__init__", [](RowsHandle* self, const std::vector<SegmentTuple>& segments) {
        std::vector<Segment> native = native_segments(segments);
        for (const Segment& segment : native) {
          ops::check_on_host(*segment.range);
        }
        new (self) RowsHandle{std::make_shared<const RowTable>(std::move(native))};
      }, "segments"_a)
      .def("__len__", [](const RowsHandle& r) { return r.object->rows().size(); });

  nb::class_<ops::Layer>(m, "Layer")
      .def("__init__", [](ops::Layer* self, PythonInt key_region, PythonInt value_region,
                          mx::Dtype type) {
        new (self) ops::Layer{key_region, value_region, type};
      }, "key_region"_a, "value_region"_a, "dtype"_a);

  nb::class_<RopeHandle>(m, "RopeTable")
      .def("__init__", [](RopeHandle* self, const std::vector<double>& frequencies,
                          double magnitude) {
        new (self) RopeHandle{std::make_shared<const ops::RopeTable>(frequencies, magnitude)};
      }, "frequencies"_a, "magnitude"_a = 1.0);

  m.def("append", [](const mx::array& token, const mx::array& keys, const mx::array& values,
                     const RowsHandle& rows, const ops::Layer& layer,
                     const WorkersHandle& workers) {
    return ops::append(token, keys, values, rows.object, layer, workers.object);
  }, "token"_a, "keys"_a, "values"_a, "rows"_a, "layer"_a, "workers"_a);
  m.def("rope_angles", [](const RowsHandle& rows, const RopeHandle& rope,
                          const WorkersHandle& workers) {
    return ops::rope_angles(rows.object, rope.object, workers.object);
  }, "rows"_a, "rope"_a, "workers"_a);
  m.def("project_append", [](const mx::array& token, const mx::array& queries,
                             const mx::array& keys, const mx::array& values,
                             const std::optional<NormsTuple>& norms,
                             const std::optional<mx::array>& angles, const RowsHandle& rows,
                             const ops::Layer& layer, const WorkersHandle& workers) {
    return ops::project_append(token, queries, keys, values, native_norms(norms), angles,
                               rows.object, layer, workers.object);
  }, "token"_a, "queries"_a, "keys"_a, "values"_a, "norms"_a.none(), "angles"_a.none(), "rows"_a,
     "layer"_a, "workers"_a);
  m.def("decode_attention", [](const mx::array& token, const mx::array& queries,
                               const RowsHandle& rows, PythonInt first_row, const ops::Layer& layer,
                               PythonInt kv_heads, double scale, const WorkersHandle& workers) {
    return ops::decode_attention(token, queries, rows.object, first_row, layer, kv_heads, scale,
                                 workers.object);
  }, "token"_a, "queries"_a, "rows"_a, "first_row"_a, "layer"_a, "kv_heads"_a, "scale"_a,
     "workers"_a);
  m.def("chunk_attention", [](const mx::array& token, const mx::array& queries,
                              const RowsHandle& rows, PythonInt segment, const ops::Layer& layer,
                              PythonInt kv_heads, double scale, const WorkersHandle& workers) {
    return ops::chunk_attention(token, queries, rows.object, segment, layer, kv_heads, scale,
                                workers.object);
  }, "token"_a, "queries"_a, "rows"_a, "segment"_a, "layer"_a, "kv_heads"_a, "scale"_a,
     "workers"_a);
  m.def("region_view", [](const mx::array& token, const RangeHandle& range, PythonInt region,
                          PythonInt tokens, PythonInt kv_heads, PythonInt head_dim,
                          mx::Dtype dtype, nb::handle substrate) {
    if (!substrate.is_none()) {
      throw nb::next_overload();
    }
    return ops::region_view(token, range.object, region, tokens, kv_heads, head_dim, dtype);
  }, "token"_a, "range"_a, "region"_a, "tokens"_a, "kv_heads"_a, "head_dim"_a, "dtype"_a,
     "substrate"_a.none() = nb::none());
  m.def("block_copy", [](const mx::array& token, const RangeHandle& source, PythonInt source_block,
                         const RangeHandle& target, PythonInt target_block, PythonInt tokens,
                         const CounterHandle& counter) {
    return ops::block_copy(token, source.object, source_block, target.object, target_block,
                           tokens, counter.object);
  }, "token"_a, "source"_a, "source_block"_a, "target"_a, "target_block"_a, "tokens"_a,
     "counter"_a);
}

using Codes = std::tuple<mx::array, std::optional<mx::array>, PythonInt, PythonInt>;

std::vector<std::optional<ops::CodeGroups>> native_codes(
    const std::vector<std::optional<Codes>>& codes) {
  std::vector<std::optional<ops::CodeGroups>> groups;
  for (const auto& its : codes) {
    groups.emplace_back();
    if (its) {
      const auto& [scales, biases, bits, group] = *its;
      groups.back() = {scales, biases, bits, group};
    }
  }
  return groups;
}

void bind_linear(nb::module_& m) {
  using Kind = std::tuple<PythonInt, mx::Dtype, PythonInt, PythonInt>;
  nb::class_<PackedHandle>(m, "PackedLinear")
      .def("__init__", [](PackedHandle* self, const std::vector<mx::array>& weights,
                          const WorkersHandle& workers,
                          const std::vector<std::optional<Codes>>& codes, bool exact) {
        new (self) PackedHandle{
            ops::pack_linear(weights, native_codes(codes), workers.object, exact)};
      }, "weights"_a, "workers"_a, "codes"_a, "exact"_a = false)
      .def_prop_ro("outputs", [](const PackedHandle& p) { return p.object->shape().outputs; })
      .def_prop_ro("inputs", [](const PackedHandle& p) { return p.object->shape().inputs; })
      .def_prop_ro("nbytes", [](const PackedHandle& p) {
        return p.object->shape().packed_bytes(); });
  m.def("packed_bytes", [](PythonInt inputs, const std::vector<Kind>& matrices) {
    std::vector<ops::MatrixKind> kinds;
    for (const auto& [outputs, numbers, bits, group] : matrices) {
      kinds.push_back({outputs, numbers, bits, group});
    }
    return ops::packed_bytes(inputs, kinds);
  }, "inputs"_a, "matrices"_a);
  m.def("linear", [](const mx::array& x, const PackedHandle& packed, const WorkersHandle& workers,
                     const std::optional<mx::array>& norm, double eps,
                     const std::optional<mx::array>& residual) {
    const auto normed = norm ? std::optional(ops::Norm{*norm, eps}) : std::nullopt;
    return ops::linear(x, packed.object, normed, residual, workers.object);
  }, "x"_a, "packed"_a, "workers"_a, nb::kw_only(), "norm"_a = nb::none(), "eps"_a = 0.0,
     "residual"_a = nb::none());
  m.def("linear_heads", [](const mx::array& x, const PackedHandle& packed,
                           const WorkersHandle& workers, const std::vector<PythonInt>& heads,
                           const std::optional<mx::array>& norm, double eps,
                           const std::optional<mx::array>& residual) {
    const auto normed = norm ? std::optional(ops::Norm{*norm, eps}) : std::nullopt;
    const std::vector<int64_t> counts(heads.begin(), heads.end());
    return ops::linear_heads(x, packed.object, counts, normed, residual, workers.object);
  }, "x"_a, "packed"_a, "workers"_a, "heads"_a, nb::kw_only(), "norm"_a = nb::none(),
     "eps"_a = 0.0, "residual"_a = nb::none());
  m.def("gated_mlp", [](const mx::array& x, const mx::array& norm, double eps,
                        const PackedHandle& gate_up, const PackedHandle& down,
                        const WorkersHandle& workers) {
    return ops::gated_mlp(x, {norm, eps}, gate_up.object, down.object, workers.object);
  }, "x"_a, "norm"_a, "eps"_a, "gate_up"_a, "down"_a, "workers"_a);
  m.def("rms_norm", [](const mx::array& x, const mx::array& weight, double eps,
                       const WorkersHandle& workers) {
    return ops::rms_norm(x, {weight, eps}, workers.object);
  }, "x"_a, "weight"_a, "eps"_a, "workers"_a);
  m.def("choose_tokens", [](const mx::array& raw, const mx::array& adjusted,
                            const mx::array& choices, const WorkersHandle& workers) {
    return ops::choose_tokens(raw, adjusted, choices, workers.object);
  }, "raw"_a, "adjusted"_a, "choices"_a, "workers"_a);
  m.def("packed_rows", [](const mx::array& ids, const PackedHandle& packed,
                          const WorkersHandle& workers) {
    return ops::packed_rows(ids, packed.object, workers.object);
  }, "ids"_a, "packed"_a, "workers"_a);
}

void bind_experts(nb::module_& m) {
  nb::class_<ExpertsHandle>(m, "PackedExperts")
      .def("__init__", [](ExpertsHandle* self, const std::vector<mx::array>& weights,
                          const WorkersHandle& workers,
                          const std::vector<std::optional<Codes>>& codes) {
        new (self) ExpertsHandle{ops::pack_experts(weights, native_codes(codes), workers.object)};
      }, "weights"_a, "workers"_a, "codes"_a)
      .def_prop_ro("experts", [](const ExpertsHandle& p) { return p.object->count(); })
      .def_prop_ro("outputs", [](const ExpertsHandle& p) { return p.object->shape().outputs; })
      .def_prop_ro("inputs", [](const ExpertsHandle& p) { return p.object->shape().inputs; })
      .def_prop_ro("nbytes", [](const ExpertsHandle& p) { return p.object->packed_bytes(); });
  m.def("mixture_mlp", [](const mx::array& x, const mx::array& norm, double eps,
                          const PackedHandle& router, const ExpertsHandle& gate_up,
                          const ExpertsHandle& down, PythonInt chosen, bool normalised,
                          const std::optional<std::pair<PackedHandle, PackedHandle>>& shared,
                          const WorkersHandle& workers) {
    ops::Mixture mixture{router.object, gate_up.object, down.object, {}, chosen, normalised};
    if (shared) {
      mixture.shared = {shared->first.object, shared->second.object};
    }
    return ops::mixture_mlp(x, {norm, eps}, mixture, workers.object);
  }, "x"_a, "norm"_a, "eps"_a, "router"_a, "gate_up"_a, "down"_a, "chosen"_a, "normalised"_a,
     "shared"_a.none(), "workers"_a);
}

}  // namespace
}  // namespace quire

NB_MODULE(_ext, m) {
  nb::module_::import_("mlx.core");  // registers mx.array, which the operations take and return
  nb::register_exception_translator(quire::translate_system_error);
  m.attr("MLX_VERSION") = std::to_string(MLX_VERSION_MAJOR) + "." +
                          std::to_string(MLX_VERSION_MINOR) + "." +
                          std::to_string(MLX_VERSION_PATCH);
  m.attr("SYSTEM_PAGE_BYTES") = quire::system_page_bytes();
  m.def("instruction_sets", &quire::cpu::available);
  quire::bind_memory(m);
  quire::bind_operations(m);
  quire::bind_linear(m);
  quire::bind_states(m);
  quire::bind_experts(m);
#ifdef QUIRE_METAL
  quire::bind_metal(m);
#else
  m.attr("HAS_METAL") = false;
#endif
}
