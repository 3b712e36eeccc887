#include "bindings.h"

using namespace nb::literals;

namespace quire {
namespace {

using Writes = std::vector<std::tuple<PythonInt, PythonInt>>;
using StateTuple = std::tuple<PythonInt, PythonInt, Writes>;

std::vector<StateSegment> native_states(const std::vector<StateTuple>& segments) {
  std::vector<StateSegment> native;
  for (const auto& [count, read, writes] : segments) {
    native.push_back({count, read, {}});
    for (const auto& [rows, address] : writes) {
      native.back().writes.push_back({rows, address});
    }
  }
  return native;
}

}  // namespace

void bind_states(nb::module_& m) {
  nb::class_<StatesHandle>(m, "StateMemory")
      .def("__init__", [](StatesHandle* self, PythonInt bytes) {
        new (self) StatesHandle{std::make_shared<StateMemory>(bytes)};
      }, "bytes"_a)
      .def_prop_ro("address", [](const StatesHandle& s) {
        return reinterpret_cast<uintptr_t>(s.object->address()); })
      .def_prop_ro("bytes", [](const StatesHandle& s) { return s.object->bytes(); })
      .def("release", [](const StatesHandle& s, PythonInt offset, PythonInt bytes) {
        const nb::gil_scoped_release unlocked;
        s.object->release(offset, bytes);
      }, "offset"_a, "bytes"_a)
      .def("committed", [](const StatesHandle& s, PythonInt offset, PythonInt bytes) {
        const nb::gil_scoped_release unlocked;
        return s.object->committed(offset, bytes);
      }, "offset"_a, "bytes"_a);

  nb::class_<StateRowsHandle>(m, "StateRows")
      .def("__init__", [](StateRowsHandle* self, const std::vector<StateTuple>& segments,
                          const std::vector<StatesHandle>& memories) {
        std::vector<std::shared_ptr<StateMemory>> native;
        for (const StatesHandle& memory : memories) {
          native.push_back(memory.object);
        }
        new (self) StateRowsHandle{
            std::make_shared<const StateRows>(native_states(segments), std::move(native))};
      }, "segments"_a, "memories"_a)
      .def("__len__", [](const StateRowsHandle& r) { return r.object->size(); });

  nb::class_<DeltaHandle>(m, "GatedDelta")
      .def("__init__", [](DeltaHandle* self, PythonInt key_heads, PythonInt value_heads,
                          PythonInt key_dim, PythonInt value_dim, const mx::array& conv,
                          const mx::array& a_log, const mx::array& dt_bias, const mx::array& norm,
                          double eps) {
        const int64_t tail_rows = conv.ndim() == 2 ? conv.shape(0) - 1 : 0;
        const ops::DeltaShape shape{key_heads, value_heads, key_dim, value_dim, tail_rows};
        new (self) DeltaHandle{
            std::make_shared<const ops::GatedDelta>(shape, conv, a_log, dt_bias, norm, eps)};
      }, nb::kw_only(), "key_heads"_a, "value_heads"_a, "key_dim"_a, "value_dim"_a, "conv"_a,
         "a_log"_a, "dt_bias"_a, "norm"_a, "eps"_a);

  m.def("gated_delta", [](const mx::array& token, const mx::array& qkv, const mx::array& z,
                          const mx::array& a, const mx::array& b, const DeltaHandle& delta,
                          const StateRowsHandle& rows, PythonInt offset,
                          const WorkersHandle& workers) {
    return ops::gated_delta(token, qkv, z, a, b, delta.object, rows.object, offset,
                            workers.object);
  }, "token"_a, "qkv"_a, "z"_a, "a"_a, "b"_a, "delta"_a, "rows"_a, "offset"_a, "workers"_a);
}

}  // namespace quire
