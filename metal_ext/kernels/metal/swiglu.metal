// Computes the gated product of an MLP, between the MLP's two matrix products.
#include "gate.h"

// Computes gated products in float32 and rounds to T. A thread computes kSwigluNumbers elements,
// and the last one those that are left.
template <typename T>
[[kernel]] void swiglu(
    const device T* gate [[buffer(0)]],
    const device T* up [[buffer(1)]],
    device T* out [[buffer(2)]],
    constant SwigluArguments& arguments [[buffer(3)]],
    uint at [[thread_position_in_grid]]) {
  const uint first = at * kSwigluNumbers;
  if (first + kSwigluNumbers > arguments.elements) {
    for (uint element = first; element < arguments.elements; ++element) {
      out[element] = static_cast<T>(
          gated(arguments.gate, float(gate[element]), float(up[element])));
    }
    return;
  }
  const float4 gates = as_floats<4, T>(load<4>(gate + first));
  const float4 numbers = as_floats<4, T>(load<4>(up + first));
  float4 result;
  QUIRE_UNROLL
  for (uint i = 0; i < kSwigluNumbers; ++i) {
    result[i] = gated(arguments.gate, gates[i], numbers[i]);
  }
  store<4>(out + first, result);
}
