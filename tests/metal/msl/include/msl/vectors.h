// vec<T, N>: aligned to its size (three components: to four), component by component.
#pragma once

#include "../../executor.h"
#include "numbers.h"

namespace metal {

template <class T, int N>
struct vec_components;
template <class T>
struct vec_components<T, 2> {
  T x, y;
};
template <class T>
struct vec_components<T, 3> {
  T x, y, z;
};
template <class T>
struct vec_components<T, 4> {
  T x, y, z, w;
};

template <class T, int N>
struct alignas(sizeof(T) * (N == 3 ? 4 : N)) vec : vec_components<T, N> {
  vec() = default;
  // Not the compiler's own, which copy bytes: UndefinedBehaviorSanitizer sees references that are
  // not aligned, and so reads and writes of whole vectors that Metal would not allow.
  vec(const vec& other) : vec_components<T, N>(other) {}
  vec& operator=(const vec& other) {
    vec_components<T, N>::operator=(other);
    return *this;
  }
  explicit vec(T all) {
    for (int i = 0; i < N; ++i) {
      (*this)[i] = all;
    }
  }
  template <class... Components, class = std::enable_if_t<(N > 1 && sizeof...(Components) == N)>>
  vec(Components... components) : vec_components<T, N>{static_cast<T>(components)...} {}
  template <class U>
  explicit vec(const vec<U, N>& other) {
    for (int i = 0; i < N; ++i) {
      (*this)[i] = static_cast<T>(other[i]);
    }
  }

  T& operator[](unsigned i) { return components()[checked(i)]; }
  const T& operator[](unsigned i) const {
    return const_cast<vec*>(this)->components()[checked(i)];
  }

  friend vec operator+(vec a, const vec& b) { return each(a, b, [](T x, T y) { return x + y; }); }
  friend vec operator-(vec a, const vec& b) { return each(a, b, [](T x, T y) { return x - y; }); }
  friend vec operator*(vec a, const vec& b) { return each(a, b, [](T x, T y) { return x * y; }); }
  friend vec operator/(vec a, const vec& b) { return each(a, b, [](T x, T y) { return x / y; }); }
  vec& operator+=(const vec& other) { return *this = *this + other; }
  vec& operator-=(const vec& other) { return *this = *this - other; }
  vec& operator*=(const vec& other) { return *this = *this * other; }
  vec& operator/=(const vec& other) { return *this = *this / other; }

  template <class Function>
  static vec each(vec a, const vec& b, const Function& function) {
    for (int i = 0; i < N; ++i) {
      a[i] = static_cast<T>(function(a[i], b[i]));
    }
    return a;
  }

 private:
  T* components() { return &this->x; }
  static unsigned checked(unsigned i) {
    if (i >= N) {
      ::msl::fail("component %u of a vector of %d", i, N);
    }
    return i;
  }
};

}  // namespace metal

typedef metal::vec<uint, 2> uint2;
typedef metal::vec<uint, 3> uint3;
typedef metal::vec<uint, 4> uint4;
typedef metal::vec<float, 2> float2;
typedef metal::vec<float, 4> float4;
