// What the gate of an MLP makes of its up-projection.
#pragma once

#include "rows.h"

inline float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }

// Returns what a gate g makes of u (metal_ext.gated_mlp).
inline float gated(uint kind, float g, float u) {
  if (kind == kGeluTanh) {
    return g * sigmoid(1.5957691216f * (g + 0.044715f * g * g * g)) * u;
  }
  if (kind == kClampedSilu) {
    const float low = min(g, 7.0f);
    return low * sigmoid(1.702f * low) * (max(-7.0f, min(u, 7.0f)) + 1.0f);
  }
  return g / (1.0f + precise::exp(-g)) * u;
}
