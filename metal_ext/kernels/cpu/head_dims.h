#pragma once

#include <cstddef>

namespace quire::cpu {

template <size_t D>
struct HeadDim {
  static constexpr size_t value = D;
};

constexpr size_t kMaxHeadDim = 256;

// Calls body(HeadDim<head_dim>{}) where the kernels are built for that many dimensions; does
// nothing elsewhere. All are powers of two from two of the widest vectors up.
template <class Body>
void for_head_dim(size_t head_dim, const Body& body) {
  switch (head_dim) {
    case 32: return body(HeadDim<32>{});
    case 64: return body(HeadDim<64>{});
    case 128: return body(HeadDim<128>{});
    case kMaxHeadDim: return body(HeadDim<kMaxHeadDim>{});
    default: return;
  }
}

}  // namespace quire::cpu
