#include "ops/metal/on_device.h"

#include <stdexcept>
#include <vector>

#include "core/checked.h"
#include "mlx/backend/metal/device.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

// Implements the access to MLX's device, buffers and copies.
namespace quire::ops {

MTL::Device* mlx_device() {
  // Without a device, MLX would throw, so Metal is asked first.
  const auto any = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  return any ? mx::metal::device(mx::Device::gpu).mtl_device() : nullptr;
}

void require_device_stream(const mx::Stream& stream, const char* operation) {
  require<std::runtime_error>(
      stream.device == mx::Device::gpu, operation,
      " has rows on Metal, but a CPU stream: run the model on the GPU "
      "(mlx.core.set_default_device(mlx.core.gpu))");
}

mx::allocator::Buffer as_mlx_buffer(MTL::Buffer* buffer) {
  return mx::allocator::Buffer(buffer);
}

MTL::Buffer* metal_buffer(const mx::array& array) {
  return static_cast<MTL::Buffer*>(const_cast<void*>(array.buffer().ptr()));
}

// MLX does not export a function that copies, but evaluating the operation `contiguous` copies.
mx::array ordered_copy(const mx::array& array, const mx::Stream& stream) {
  const mx::array copy = mx::contiguous(array, /*allow_col_major=*/false, stream);
  std::vector<mx::array> made{copy};
  copy.primitive().eval_gpu({array}, made);
  return copy;
}

}  // namespace quire::ops
