#pragma once

#include <Metal/Metal.hpp>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/stream.h"

// The five places where it matters that MLX runs on this device: tests that run the operations in
// another MLX put their own in place of on_device.cpp.
namespace quire::ops {

namespace mx = mlx::core;

// The device that MLX computes on; null where there is none.
MTL::Device* mlx_device();

// Throws std::runtime_error unless the stream is one of that device. operation: its name.
void require_device_stream(const mx::Stream& stream, const char* operation);

// The buffer as an array of MLX has it.
mx::allocator::Buffer as_mlx_buffer(MTL::Buffer* buffer);

// The buffer that an evaluated array of MLX lies in.
MTL::Buffer* metal_buffer(const mx::array& array);

// Encodes MLX's own copy of an array, with its elements in order, from within eval_gpu.
mx::array ordered_copy(const mx::array& array, const mx::Stream& stream);

}  // namespace quire::ops
