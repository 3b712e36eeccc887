// The mathematics, all of it precise: how far Metal's fast functions err is not shown.
#pragma once

#include <cmath>

#include "vectors.h"

namespace metal {

namespace precise {
inline float cos(float x) { return std::cos(x); }
inline float exp(float x) { return std::exp(x); }
inline float log(float x) { return std::log(x); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline float sin(float x) { return std::sin(x); }
inline float tanh(float x) { return std::tanh(x); }
inline float sqrt(float x) { return std::sqrt(x); }
}  // namespace precise
using namespace precise;

template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value>>
inline T min(T a, T b) {
  return b < a ? b : a;
}
template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value>>
inline T max(T a, T b) {
  return a < b ? b : a;
}
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }

template <class T, int N>
inline vec<T, N> max(const vec<T, N>& a, const vec<T, N>& b) {
  return vec<T, N>::each(a, b, [](T x, T y) { return max(x, y); });
}
template <int N>
inline vec<float, N> fma(const vec<float, N>& a, const vec<float, N>& b, vec<float, N> c) {
  for (int i = 0; i < N; ++i) {
    c[i] = fma(a[i], b[i], c[i]);
  }
  return c;
}

}  // namespace metal
