#pragma once

#include <Metal/Metal.hpp>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/stream.h"

// The functions that need MLX built with Metal. Tests with another MLX replace on_device.cpp.
namespace quire::ops {

namespace mx = mlx::core;

MTL::Device* mlx_device();

// Throws std::runtime_error, with the operation's name, unless the stream is a GPU's.
void require_device_stream(const mx::Stream& stream, const char* operation);

mx::allocator::Buffer as_mlx_buffer(MTL::Buffer* buffer);

MTL::Buffer* metal_buffer(const mx::array& array);

// Encodes MLX's own command to copy an array in row-major order. For use inside eval_gpu.
mx::array ordered_copy(const mx::array& array, const mx::Stream& stream);

}  // namespace quire::ops
