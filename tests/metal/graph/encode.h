#pragma once

#include <Metal/Metal.hpp>

#include "model_objects.h"

namespace quire::graph {

// Binds an array as MLX's encoder does. Reports one that shows more of a device's memory than its
// first byte: MLX would count it.
void bind(ComputeEncoder& encoder, const mlx::core::array& array, int index, int64_t offset);

// A dispatch of what is bound: held against all rules, and run later. Nothing is bound behind it.
void encode(
    ComputeEncoder& encoder, const CommandBuffer& commands, MTL::Size grid, MTL::Size threads,
    bool counts_threads);

// Whether the address is that of a buffer of the fake device.
bool in_device_memory(const void* address);

}  // namespace quire::graph
