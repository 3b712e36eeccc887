#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/heap.h"
#include "core/mapper.h"
#include "core/row_table.h"
#include "core/states.h"
#include "ops/ops.h"
#include "ops/packed_linear.h"

namespace nb = nanobind;
namespace mx = mlx::core;

// Converts values between C++ and Python, so that functions of ops/ can be bound unchanged.
namespace quire {

// Holds a native object for Python. nanobind can hold shared_ptrs itself, but releases them only
// under Python's interpreter lock, which MLX's threads do not hold.
template <class T>
struct Handle {
  std::shared_ptr<T> object;
};

using HeapPointer = std::shared_ptr<Heap>;
using RangePointer = std::shared_ptr<AddressRange>;
using MapperPointer = std::shared_ptr<Mapper>;

template <class T, class... Arguments>
void construct(Handle<T>* self, Arguments... arguments) {
  new (self) Handle<T>{std::make_shared<T>(std::move(arguments)...)};
}

// Makes a function that calls a method of the object in a Handle, to be bound by nanobind.
template <class T, class Result, class... Arguments>
auto held(Result (T::*member)(Arguments...) const) {
  return [member](const Handle<T>& handle, Arguments... arguments) {
    return ((*handle.object).*member)(arguments...);
  };
}
template <class T, class Result, class... Arguments>
auto held(Result (T::*member)(Arguments...)) {
  return [member](const Handle<T>& handle, Arguments... arguments) {
    return ((*handle.object).*member)(arguments...);
  };
}

// Converts a Python tuple to a struct whose fields are the tuple's items, in order.
template <class Aggregate, class... Fields>
struct TupleCaster {
  using Tuple = std::tuple<Fields...>;
  using Caster = nb::detail::make_caster<Tuple>;
  static constexpr auto Name = Caster::Name;
  template <class>
  using Cast = Aggregate;
  template <class>
  static constexpr bool can_cast() {
    return true;
  }

  bool from_python(nb::handle source, uint32_t flags, nb::detail::cleanup_list* cleanup) noexcept {
    return tuple.from_python(source, flags, cleanup);
  }
  explicit operator Aggregate() {
    return std::apply([](auto&&... fields) { return Aggregate{std::move(fields)...}; },
                      tuple.operator Tuple());
  }

  Caster tuple;
};

void bind_metal(nb::module_& m);

}  // namespace quire

namespace nanobind::detail {

// Clamps a Python integer to 64 bits, so that it reaches the range check that refuses it.
template <>
struct type_caster<int64_t> {
  NB_TYPE_CASTER(int64_t, const_name("int"))

  bool from_python(handle source, uint32_t, cleanup_list*) noexcept {
    int beyond = 0;
    value = PyLong_AsLongLongAndOverflow(source.ptr(), &beyond);
    if (PyErr_Occurred()) {  // the value is no integer
      PyErr_Clear();
      return false;
    }
    if (beyond != 0) {
      value = beyond > 0 ? INT64_MAX : INT64_MIN;
    }
    return true;
  }
};

template <class T>
struct type_caster<std::shared_ptr<T>> {
  using Held = quire::Handle<std::remove_const_t<T>>;
  using Caster = make_caster<Held>;
  NB_TYPE_CASTER(std::shared_ptr<T>, Caster::Name)

  bool from_python(handle source, uint32_t flags, cleanup_list* cleanup) noexcept {
    Caster caster;
    if (source.is_none() || !caster.from_python(source, flags, cleanup)) {
      return false;
    }
    value = static_cast<Held&>(caster).object;
    return true;
  }
  static handle from_cpp(const std::shared_ptr<T>& object, rv_policy, cleanup_list* cleanup) {
    return Caster::from_cpp(Held{object}, rv_policy::move, cleanup);
  }
};

template <>
struct type_caster<quire::Segment>
    : quire::TupleCaster<quire::Segment, std::shared_ptr<quire::AddressRange>, int64_t, int64_t> {};
template <>
struct type_caster<quire::StateWrite> : quire::TupleCaster<quire::StateWrite, int64_t, int64_t> {};
template <>
struct type_caster<quire::StateSegment>
    : quire::TupleCaster<quire::StateSegment, int64_t, int64_t, std::vector<quire::StateWrite>> {};
template <>
struct type_caster<quire::ops::QKNorms>
    : quire::TupleCaster<quire::ops::QKNorms, mx::array, mx::array, double> {};
template <>
struct type_caster<quire::ops::CodeGroups>
    : quire::TupleCaster<quire::ops::CodeGroups, mx::array, std::optional<mx::array>,
                         int64_t, int64_t> {};
template <>
struct type_caster<quire::ops::MatrixKind>
    : quire::TupleCaster<quire::ops::MatrixKind, int64_t, mx::Dtype, int64_t, int64_t> {};

}  // namespace nanobind::detail
