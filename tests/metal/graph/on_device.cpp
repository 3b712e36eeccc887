// In the place of csrc/ops/metal/on_device.cpp: the fake device, MLX's CPU streams, and buffers as
// MLX's CPU allocator has them.
#include "ops/metal/on_device.h"

#include <map>
#include <vector>

#include "mlx/backend/metal/device.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx_model.h"
#include "recorder.h"

namespace quire::ops {

MTL::Device* mlx_device() { return mx::metal::device(mx::Device::gpu).mtl_device(); }

// Every operation asks this first.
void require_device_stream(const mx::Stream&, const char* operation) {
  graph::Recorder::instance().begin(operation);
}

// An array's memory begins behind eight bytes for its size. Nobody asks for the size of a view.
mx::allocator::Buffer as_mlx_buffer(MTL::Buffer* buffer) {
  return mx::allocator::Buffer(reinterpret_cast<void*>(buffer->gpuAddress() - sizeof(size_t)));
}

// One of the fake device's that stands for the array's memory, as long as the process lives.
MTL::Buffer* metal_buffer(const mx::array& array) {
  static std::map<const void*, MTL::Buffer*> made;
  MTL::Buffer*& buffer = made[array.buffer().ptr()];
  if (buffer == nullptr) {
    buffer = mlx_device()->newBuffer(array.nbytes(), MTL::ResourceStorageModeShared);
  }
  return buffer;
}

mx::array ordered_copy(const mx::array& array, const mx::Stream& stream) {
  if (graph::Recorder::instance().call("ordered_copy") == "drop") {
    return array;
  }
  mx::array copy = mx::contiguous(array, /*allow_col_major=*/false, stream);
  std::vector<mx::array> made{copy};
  copy.primitive().eval_cpu({array}, made);
  graph::encode_foreign(stream, {array}, copy);
  return copy;
}

}  // namespace quire::ops
