#pragma once

#include <Metal/Metal.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/address_range.h"
#include "core/checked.h"
#include "core/metal/kernel_text.h"
#include "core/metal/kv_backend.h"
#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/device.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"

namespace mlx::core::metal {
class CommandEncoder;
}

// Encodes operations over a GPU's memory of K and V into MLX's command encoders.
namespace quire::ops {

namespace mx = mlx::core;

// A GPU's memory, and the state of its steps in MLX's graph. For the engine's thread only.
struct MetalKVBackend {
  std::shared_ptr<metal::KVBackend> memory;
  // The epochs (numbers) of steps that have begun, and whose step_end() is not in the graph yet.
  std::set<uint64_t> open_epochs;
  // The result of the newest step_end(), an input of the next step_end(). MLX orders operations by
  // inputs alone, and steps must end in order, because an event's values must rise.
  std::optional<mx::array> newest_end;
  uint64_t newest_ended = 0;  // the epoch of newest_end
  // Sparse ranges whose newest step has a single row, and that step's epoch. No command declares a
  // write to these buffers, so only the ordering handle (ops/ops.h) orders uses of the row.
  std::map<const AddressRange*, uint64_t> by_address;
  // The encoder to which use() last listed resources, on systems without residency sets. The
  // encoder is retained so that no other encoder gets the same address.
  NS::SharedPtr<MTL::ComputeCommandEncoder> told;
  size_t told_resources = 0;
  // The newest command buffer with a command over this memory, and how many there were. The buffer
  // is retained so that no other buffer gets the same address.
  NS::SharedPtr<MTL::CommandBuffer> newest_commands;
  uint64_t command_buffers = 0;
};

using DeviceMemory = std::shared_ptr<MetalKVBackend>;

// Encodes one operation's commands into MLX's command encoder, inside eval_gpu. MLX commits them.
// MLX runs commands concurrently, unless one writes an array whose MTL::Buffer another one uses.
// Three rules therefore keep rows from being read too early:
//   An operation that writes rows passes the ordering handle (ops/ops.h) to output().
//   An operation that reads rows by address passes the handle to after() before its first command.
//   An operation also passes an array of the range's buffer to output(), if region_view() may show
//   the rows that it writes, because MLX's own commands read views without a handle.
class Encoder {
 public:
  // Throws std::runtime_error unless the stream is a GPU's.
  Encoder(const mx::Stream& stream, const char* operation);

  // Declares that the next commands use the backend's memory.
  void use(MetalKVBackend& kv_backend);

  // Returns the array if its elements are in order without gaps, and the first is aligned to four,
  // as kernels load them; else a copy by a command of MLX. Whole rows of aligned arrays are
  // aligned. Callers must call this before the other methods for the next command.
  mx::array contiguous(const mx::array& array);
  // Calls contiguous() for inputs 1 to `count` of an operation. Input 0 is the ordering handle.
  std::vector<mx::array> contiguous_inputs(const std::vector<mx::array>& in, size_t count) {
    std::vector<mx::array> read;
    for (size_t i = 1; i <= count; ++i) {
      read.push_back(contiguous(in[i]));
    }
    return read;
  }

  // Orders the next command after all writers of the array.
  void after(const mx::array& array);

  // Sets the next command's kernel. All of the kernel's arguments must be set afterwards.
  void kernel(const metal::Kernel& kernel);
  void input(const mx::array& array, int index, int64_t offset_bytes = 0);
  void inputs(const std::vector<mx::array>& arrays) {  // at indices 0, 1, ...
    for (size_t i = 0; i < arrays.size(); ++i) {
      input(arrays[i], narrowed<int>("index", i));
    }
  }
  void output(mx::array& array, int index);
  template <class T>
  void bytes(const T& value, int index) {
    static_assert(sizeof(T) <= 4096, "Metal copies no more than that into a command");
    set_bytes(&value, sizeof(T), index);
  }

  // Runs `threads` threads of the kernel, in the longest threadgroups along the first axis.
  void run_threads(MTL::Size threads);
  void run_groups(MTL::Size groups);

  // Keeps an array until the commands have run.
  void keep(mx::array temporary);
  // Sets the event to the value after everything encoded so far has run.
  void signal(MTL::SharedEvent* event, uint64_t value);

 private:
  void set_bytes(const void* value, size_t count, int index);

  const mx::Stream stream_;
  mx::metal::CommandEncoder& encoder_;
  size_t threads_ = 0;  // threads in a group of the kernel
};

// An operation on a GPU. work.encode(encoder, in, out) encodes its commands. If work has `rows`,
// their step must not have ended. If it has `rows` or a `kv_backend`, it uses the backend's memory.
template <class Work>
class DeviceOperation final : public mx::Primitive {
 public:
  DeviceOperation(const char* name, Work work)
      : Primitive(mx::default_stream(mx::default_device())), name_(name), work_(std::move(work)) {}

  const char* name() const override { return name_; }

  void eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    if constexpr (requires { work_.rows; }) {
      work_.rows->require_not_ended(name_);
    }
    Encoder encoder(stream(), name_);
    if constexpr (requires { work_.rows; }) {
      encoder.use(*work_.rows->kv_backend());
    } else if constexpr (requires { work_.kv_backend; }) {
      encoder.use(*work_.kv_backend);
    }
    work_.encode(encoder, in, out);
  }
  // The encoder refuses a CPU stream with a clear message.
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    eval_gpu(in, out);
  }

 private:
  const char* const name_;
  const Work work_;
};

template <class Work>
std::shared_ptr<mx::Primitive> device_operation(const char* name, Work work) {
  return std::make_shared<DeviceOperation<Work>>(name, std::move(work));
}

// Allocates MLX memory for a result or an intermediate array.
inline void allocate_on_device(mx::array& result) {
  result.set_data(mx::allocator::malloc(result.nbytes()));
}

// Returns an intermediate array for Encoder::keep().
inline mx::array temporary(size_t rows, size_t columns, mx::Dtype type = mx::float32) {
  return mx::array(
      mx::allocator::malloc(rows * columns * mx::size_of(type)),
      {narrowed<int>("rows", rows), narrowed<int>("columns", columns)}, type);
}

}  // namespace quire::ops
