#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/device.h"
#include "mlx/ops.h"
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

// An operation whose result lies row by row, where it has one alone.
class RowsPrimitive : public CachePrimitive {
 public:
  using CachePrimitive::CachePrimitive;
};

// x as tasks read it, row by row. What is known to lie so is no further node of the graph: for each
// of them MLX queues two tasks, of which a layer would have more than of its own.
inline mx::array row_by_row(const mx::array& x) {
  if (x.status() != mx::array::Status::unscheduled) {
    return x.flags().row_contiguous ? x : mx::contiguous(x);
  }
  const bool is_known = x.siblings().empty() && x.has_primitive() &&
                        dynamic_cast<const RowsPrimitive*>(&x.primitive()) != nullptr;
  return is_known ? x : mx::contiguous(x);
}

}  // namespace quire::ops
