#include "core/metal/buffer_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace quire::metal {

BufferPlan::BufferPlan(const Geometry& geometry, size_t max_buffer_bytes) {
  const size_t blocks = geometry.blocks_per_range();
  for (size_t layer = 0; layer < geometry.regions(); layer += 2) {
    const size_t end = std::min(layer + 2, geometry.regions());
    size_t layer_bytes = 0;
    for (size_t region = layer; region < end; ++region) {
      layer_bytes += geometry.region_block_bytes(region) * blocks;
    }
    if (layer_bytes > max_buffer_bytes) {
      throw std::runtime_error(
          "a layer's keys and values of one sequence take " + std::to_string(layer_bytes) +
          " bytes, but a buffer has " + std::to_string(max_buffer_bytes) +
          " at most; a smaller maximum context is needed");
    }
    if (bytes.empty() || bytes.back() + layer_bytes > max_buffer_bytes) {
      bytes.push_back(0);
    }
    for (size_t region = layer; region < end; ++region) {
      const uint64_t stride = geometry.region_block_bytes(region) * blocks;
      if (bytes.back() == 0 || runs.back().stride != stride) {
        runs.push_back({region, 0, stride});
      }
      ++runs.back().regions;
      places.push_back({bytes.size() - 1, bytes.back()});
      bytes.back() += stride;
    }
  }
}

}  // namespace quire::metal
