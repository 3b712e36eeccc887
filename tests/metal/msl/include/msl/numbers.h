// half and bfloat: stored in two bytes, every operation in float32, rounded to nearest even.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

struct half {
  half() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value>>
  explicit half(T x) : value_(static_cast<_Float16>(static_cast<float>(x))) {}
  operator float() const { return static_cast<float>(value_); }

 private:
  _Float16 value_;
};

struct bfloat {
  bfloat() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value>>
  explicit bfloat(T number) {
    const float x = static_cast<float>(number);
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    const bool is_nan = x != x;
    bits_ = static_cast<uint16_t>(
        is_nan ? bits >> 16 | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
  operator float() const {
    const uint32_t bits = static_cast<uint32_t>(bits_) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
  }

 private:
  uint16_t bits_;
};

template <class To, class From>
inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

static_assert(sizeof(half) == 2 && sizeof(bfloat) == 2, "as on the device");
