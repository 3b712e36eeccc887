#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace quire {

// An integer argument. Python's have no limits: one beyond 64 bits becomes the nearest that 64 bits
// can hold, so that the check of its interval refuses it by name, as it does every other.
struct PythonInt {
  int64_t value;
  operator int64_t() const { return value; }
};

}  // namespace quire

template <>
struct nanobind::detail::type_caster<quire::PythonInt> {
  NB_TYPE_CASTER(quire::PythonInt, const_name("int"))

  bool from_python(handle source, uint32_t, cleanup_list*) noexcept {
    int beyond = 0;
    value.value = PyLong_AsLongLongAndOverflow(source.ptr(), &beyond);
    if (PyErr_Occurred()) {  // not an integer
      PyErr_Clear();
      return false;
    }
    if (beyond != 0) {
      value.value = beyond > 0 ? INT64_MAX : INT64_MIN;
    }
    return true;
  }
};
