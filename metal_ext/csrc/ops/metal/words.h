#pragma once

#include <Metal/Metal.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "core/checked.h"
#include "mlx/allocator.h"
#include "mlx/array.h"
#include "ops/metal/on_device.h"

// What the host says to the commands of a step, as arrays of MLX.
namespace quire::ops {

// What the host writes once for the device to read, as an array of 32-bit words. MLX holds it until
// the commands that read it have run, and `kept` with it.
template <class T>
mx::array words_of(const std::vector<T>& values, std::shared_ptr<const void> kept = nullptr) {
  static_assert(sizeof(T) % sizeof(uint32_t) == 0);
  const size_t bytes = values.size() * sizeof(T);
  auto memory = std::make_shared<mx::allocator::Data>(mx::allocator::malloc(bytes));
  mx::allocator::Buffer buffer = memory->buffer();
  std::memcpy(buffer.raw_ptr(), values.data(), bytes);
  return mx::array(
      mx::allocator::Data(buffer, [memory, kept](mx::allocator::Buffer) {}),
      {narrowed<int>("words", bytes / sizeof(uint32_t))}, mx::uint32);
}

// Stands for a buffer in what MLX knows of reads and writes. It has one element, because MLX counts
// the elements of what a command uses, and gives the commands away early when they are many.
inline mx::array stand_in(MTL::Buffer* buffer) {
  return mx::array(
      mx::allocator::Data(as_mlx_buffer(buffer), [](mx::allocator::Buffer) {}), {1}, mx::uint8);
}

}  // namespace quire::ops
