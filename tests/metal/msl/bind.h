// From the attributes of a kernel's parameters to its arguments. translate.py writes a Binding for
// each parameter; the types come from the function itself.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "executor.h"
#include "launch.h"

namespace msl {

struct Binding {
  enum Kind {
    buffer,
    thread_position_in_grid,
    thread_position_in_threadgroup,
    threadgroup_position_in_grid,
    threads_per_grid,
    threadgroups_per_grid,
    threads_per_threadgroup,
    thread_index_in_threadgroup,
    simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup,
    simdgroups_per_threadgroup,
    threads_per_simdgroup,
  };
  Kind kind;
  int index;  // of a buffer
};

inline Size value_of(Binding::Kind kind) {
  const Place& at = place();
  const Size group = at.threadgroup;
  const Size full = at.full_threadgroup_size;
  const Size in = at.in_threadgroup;
  switch (kind) {
    case Binding::thread_position_in_grid:
      return {group.x * full.x + in.x, group.y * full.y + in.y, group.z * full.z + in.z};
    case Binding::thread_position_in_threadgroup:
      return in;
    case Binding::threadgroup_position_in_grid:
      return group;
    case Binding::threads_per_grid:
      return at.threads;
    case Binding::threadgroups_per_grid:
      return at.threadgroups;
    case Binding::threads_per_threadgroup:
      return at.threadgroup_size;
    case Binding::thread_index_in_threadgroup:
      return {at.index, 0, 0};
    case Binding::simdgroup_index_in_threadgroup:
      return {at.simdgroup, 0, 0};
    case Binding::thread_index_in_simdgroup:
      return {at.lane, 0, 0};
    case Binding::simdgroups_per_threadgroup:
      return {at.simdgroups, 0, 0};
    case Binding::threads_per_simdgroup:
      return {kSimdWidth, 0, 0};
    case Binding::buffer:
      break;
  }
  fail("a parameter without a binding");
}

// T: a number, or a vector with two or three components.
template <class T>
T size_as(Size size) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<T>(size.x);
  } else if constexpr (requires(T vector) { vector.z; }) {
    return T(size.x, size.y, size.z);
  } else {
    return T(size.x, size.y);
  }
}

template <class T>
T argument(const Binding& binding, void** buffers) {
  if constexpr (std::is_pointer_v<T> || std::is_reference_v<T>) {
    using Target = std::remove_reference_t<std::remove_pointer_t<T>>;
    void* const address = buffers[binding.index];
    if (address == nullptr) {
      fail("buffer %d is not bound", binding.index);
    }
    if (reinterpret_cast<uintptr_t>(address) % alignof(Target) != 0) {
      fail("buffer %d is not aligned to %zu bytes", binding.index, alignof(Target));
    }
    if constexpr (std::is_pointer_v<T>) {
      return static_cast<T>(address);
    } else {
      return *static_cast<Target*>(address);
    }
  } else {
    return size_as<T>(value_of(binding.kind));
  }
}

// A kernel and how it is called.
template <class... Parameters>
struct Bound {
  void (*function)(Parameters...);
  const Binding* bindings;
  void** buffers;

  static void call(const void* context) {
    static_cast<const Bound*>(context)->call_with(std::index_sequence_for<Parameters...>());
  }
  template <size_t... I>
  void call_with(std::index_sequence<I...>) const {
    function(argument<Parameters>(bindings[I], buffers)...);
  }
};

template <class... Parameters>
void launch(
    const char* name, unsigned max_threads, bool counts_threads, void (*function)(Parameters...),
    const Binding* bindings, void** buffers, const unsigned* grid, const unsigned* threads) {
  const Bound<Parameters...> bound{function, bindings, buffers};
  run({name, max_threads, counts_threads, {grid[0], grid[1], grid[2]},
       {threads[0], threads[1], threads[2]}, bound.call, &bound});
}

struct Registration {
  explicit Registration(const msl_kernel& kernel);
};

}  // namespace msl

// launch_<name> and launch_threads_<name>, found by find_launcher. The bindings follow, in braces.
#define MSL_LAUNCHER(name, kernel, max, ...)                                                 \
  static const ::msl::Binding name##_bindings[] = __VA_ARGS__;                               \
  MSL_LAUNCH(launch_##name, #name, kernel, max, false, name##_bindings)                      \
  MSL_LAUNCH(launch_threads_##name, #name, kernel, max, true, name##_bindings)               \
  static const ::msl::Registration name##_registration(                                      \
      {#name, launch_##name, launch_threads_##name, max})

#define MSL_LAUNCH(function, name, kernel, max, counts_threads, bindings)                    \
  extern "C" __attribute__((visibility("default"))) void function(                           \
      void** buffers, const unsigned* grid, const unsigned* threads) {                       \
    ::msl::launch(name, max, counts_threads, &kernel, bindings, buffers, grid, threads);     \
  }
