// Barriers, and what the lanes of a simdgroup do together: each is a meeting (executor.h).
#pragma once

#include "math.h"

namespace metal {

enum class mem_flags : unsigned { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

inline void threadgroup_barrier(mem_flags flags, ::msl::Site site = ::msl::Site::here()) {
  ::msl::threadgroup_barrier(
      {"threadgroup_barrier", site.line, site.column}, flags != mem_flags::mem_none);
}
inline void simdgroup_barrier(mem_flags flags, ::msl::Site site = ::msl::Site::here()) {
  ::msl::simdgroup_barrier(
      {"simdgroup_barrier", site.line, site.column}, flags != mem_flags::mem_none);
}

template <class T>
inline ::msl::Word to_word(T value) {
  static_assert(sizeof(T) <= sizeof(::msl::Word), "a scalar");
  ::msl::Word word = 0;
  __builtin_memcpy(&word, &value, sizeof(value));
  return word;
}
template <class T>
inline T from_word(::msl::Word word) {
  T value;
  __builtin_memcpy(&value, &word, sizeof(value));
  return value;
}

// In pairs, pairs of pairs and so on, lanes that do not exist left out.
template <class T, class Function>
__attribute__((no_sanitize("thread"))) inline ::msl::Word fold(
    const ::msl::Word* words, uint32_t lanes, const Function& function) {
  T values[::msl::kSimdWidth];
  for (unsigned i = 0; i < ::msl::kSimdWidth; ++i) {
    values[i] = from_word<T>(words[i]);
  }
  for (unsigned apart = 1; apart < ::msl::kSimdWidth; apart *= 2) {
    for (unsigned i = 0; i < ::msl::kSimdWidth; i += 2 * apart) {
      const bool here = lanes >> i & 1;
      const bool there = lanes >> (i + apart) & 1;
      if (here && there) {
        values[i] = static_cast<T>(function(values[i], values[i + apart]));
      }
    }
  }
  return to_word(values[0]);
}

template <class T>
inline T simd_sum(T value, ::msl::Site site = ::msl::Site::here()) {
  return from_word<T>(::msl::reduce(
      {"simd_sum", site.line, site.column}, to_word(value), [](const ::msl::Word* w, uint32_t l) {
        return fold<T>(w, l, [](T a, T b) { return a + b; });
      }));
}
template <class T>
inline T simd_max(T value, ::msl::Site site = ::msl::Site::here()) {
  return from_word<T>(::msl::reduce(
      {"simd_max", site.line, site.column}, to_word(value), [](const ::msl::Word* w, uint32_t l) {
        return fold<T>(w, l, [](T a, T b) { return metal::max(a, b); });
      }));
}
template <class T>
inline T simd_min(T value, ::msl::Site site = ::msl::Site::here()) {
  return from_word<T>(::msl::reduce(
      {"simd_min", site.line, site.column}, to_word(value), [](const ::msl::Word* w, uint32_t l) {
        return fold<T>(w, l, [](T a, T b) { return metal::min(a, b); });
      }));
}
template <class T>
inline T simd_shuffle_xor(T value, ushort mask, ::msl::Site site = ::msl::Site::here()) {
  return from_word<T>(::msl::take(
      {"simd_shuffle_xor", site.line, site.column}, to_word(value), mask));
}

}  // namespace metal
