// Computes the gated product of an MLP, between the MLP's two matrix products.
#include "rows.h"

// Computes silu(gate) * up in float32 and rounds to T. A thread computes kSwigluNumbers elements.
template <typename T>
[[kernel]] void swiglu(
    const device T* gate [[buffer(0)]],
    const device T* up [[buffer(1)]],
    device T* out [[buffer(2)]],
    constant uint& elements [[buffer(3)]],
    uint at [[thread_position_in_grid]]) {
  QUIRE_UNROLL
  for (uint i = 0; i < kSwigluNumbers; ++i) {
    const uint element = at * kSwigluNumbers + i;
    if (element < elements) {
      const float x = float(gate[element]);
      out[element] = static_cast<T>(x / (1.0f + precise::exp(-x)) * float(up[element]));
    }
  }
}
