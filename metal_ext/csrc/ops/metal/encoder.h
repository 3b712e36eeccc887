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
#include "core/metal/substrate.h"
#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/device.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"

namespace mlx::core::metal {
class CommandEncoder;
}

namespace quire::ops {

namespace mx = mlx::core;

// A substrate, and its state in MLX's graph and encoders. Engine's thread.
struct MetalSubstrate {
  std::shared_ptr<metal::Substrate> memory;
  // Steps that have begun, and have no end in the graph yet.
  std::set<uint64_t> open_epochs;
  // The end of the newest step that has one: an input of the next one's, because an event's values
  // only rise, and MLX's order is that of inputs alone.
  std::optional<mx::array> newest_end;
  uint64_t newest_ended = 0;  // the epoch of that
  // Sparse ranges of which the newest step has one row, and its epoch. Such rows are read by
  // address alone, behind the token: no command says that it writes the range's buffers.
  std::map<const AddressRange*, uint64_t> by_address;
  // Without residency sets: the encoder that knows its resources, and their number. It is kept, so
  // that no other encoder can have its address.
  NS::SharedPtr<MTL::ComputeCommandEncoder> told;
  size_t told_resources = 0;
};

using DeviceMemory = std::shared_ptr<MetalSubstrate>;

// One operation's commands in MLX's command encoder, from within eval_gpu.
//
// MLX lets the commands of an encoder run at the same time, and encoders too, except where it sees
// that one writes an array that another one uses; then it puts a barrier or a fence between them.
// It knows an array by its MTL::Buffer. So an operation that writes rows writes the cache token,
// and one that reads rows by address names the token (`after`) before its first command. MLX's own
// commands read views of rows (region_view) without any token: an operation that writes rows of a
// range that may be viewed also declares the range's buffer as an output (`output` of an array that
// stands for it). Neither may be left out: without them rows are read too early, now and then.
//
// Nothing is committed here: MLX holds on to the command buffer across the call.
class Encoder {
 public:
  // Throws std::runtime_error where the stream is not the device's.
  Encoder(const mx::Stream& stream, const char* operation);

  // The commands use rows of the substrate.
  void use(MetalSubstrate& substrate);

  // The array, where its elements lie in order without gaps; else a copy of it that does, made by a
  // command of MLX's. Comes before the calls for the next command.
  mx::array contiguous(const mx::array& array);
  // The same for the inputs of an operation behind the token, 1 to `count`.
  std::vector<mx::array> contiguous_inputs(const std::vector<mx::array>& in, size_t count) {
    std::vector<mx::array> read;
    for (size_t i = 1; i <= count; ++i) {
      read.push_back(contiguous(in[i]));
    }
    return read;
  }

  // The next command runs after whatever wrote the array.
  void after(const mx::array& array);

  // The kernel and the arguments of the next command. Every command needs all of them anew.
  void kernel(const metal::Kernel& kernel);
  void input(const mx::array& array, int index, int64_t offset_bytes = 0);
  void inputs(const std::vector<mx::array>& arrays) {  // at 0 and behind
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

  // The kernel runs with that many threads, in groups of as many along the first axis as it has.
  void run_threads(MTL::Size threads);
  // The kernel runs in that many groups.
  void run_groups(MTL::Size groups);

  // Keeps an array that the commands use until they have run.
  void keep(mx::array temporary);
  // Sets the event to the value when everything that was encoded has run.
  void signal(MTL::SharedEvent* event, uint64_t value);

 private:
  void set_bytes(const void* value, size_t count, int index);

  const mx::Stream stream_;
  mx::metal::CommandEncoder& encoder_;
  size_t threads_ = 0;  // of a group of the kernel
};

// An operation on Metal: work.encode(encoder, in, out) encodes its commands. Where the work has
// `rows`, a step's, these must not have ended; where it has those or a `substrate`, it uses the
// substrate's memory.
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
      encoder.use(*work_.rows->substrate());
    } else if constexpr (requires { work_.substrate; }) {
      encoder.use(*work_.substrate);
    }
    work_.encode(encoder, in, out);
  }
  // A CPU stream is refused by the encoder, in the words that say why.
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

// Memory of MLX's for a result, or for what an operation computes on the way.
inline void allocate_on_device(mx::array& result) {
  result.set_data(mx::allocator::malloc(result.nbytes()));
}

}  // namespace quire::ops
