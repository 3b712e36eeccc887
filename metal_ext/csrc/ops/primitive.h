#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/device.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"

namespace quire::ops {

namespace mx = mlx::core;

// Gives a result its memory. Throws std::runtime_error where the system has none: MLX's allocator
// does not look, and what is written then is written to address 0.
inline void allocate(mx::array& result) {
  mx::allocator::Data memory = mx::allocator::malloc(result.nbytes());
  if (memory.buffer().ptr() == nullptr) {
    throw std::runtime_error(
        "the system has no memory for a result of " + std::to_string(result.nbytes()) + " bytes");
  }
  result.set_data(std::move(memory));
}

// What the operations on the CPU share.
class CachePrimitive : public mx::Primitive {
 public:
  CachePrimitive(const char* name)
      : Primitive(mx::default_stream(mx::default_device())), name_(name) {}

  const char* name() const override { return name_; }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(
        std::string(name_) +
        " has rows on the CPU, but a GPU stream: run the model on the CPU "
        "(mlx.core.set_default_device(mlx.core.cpu))");
  }

 protected:
  // Runs task on the CPU stream's thread after everything that was queued before. The task keeps
  // what it captures alive; inputs and outputs are kept by MLX until it has run.
  template <class Task>
  void enqueue(Task task) {
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

 private:
  const char* name_;
};

}  // namespace quire::ops
