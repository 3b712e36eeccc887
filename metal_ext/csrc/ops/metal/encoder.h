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

// A substrate, and what MLX's graph and encoders know of it. Engine's thread.
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
  // Where there are no residency sets: the encoder that was told what it uses, and how much that
  // was. Kept, so that no other encoder can have its address.
  NS::SharedPtr<MTL::ComputeCommandEncoder> told;
  size_t told_resources = 0;
};

using DeviceMemory = std::shared_ptr<MetalSubstrate>;

// One operation's commands in MLX's command encoder, from within eval_gpu.
//
// MLX lets the commands of an encoder run at the same time, and encoders too, except where it sees
// that one writes an array that another one uses; then it puts a barrier or a fence between them.
// An array is its MTL::Buffer to it. So whatever writes rows writes the cache token, and whatever
// reads rows by address names the token (`after`) before its first command. MLX's own commands read
// views of rows (region_view) and know of no token: whatever writes rows of a range that may be
// viewed says that it writes the range's buffer, too (`output` of an array that stands for it).
// Neither may be left out: what is missing is read too early, now and then.
//
// Nothing is committed here: MLX holds on to the command buffer across the call.
class Encoder {
 public:
  // Throws std::runtime_error where the stream is not the device's.
  Encoder(const mx::Stream& stream, const char* operation);

  // The commands use rows of the substrate.
  void use(MetalSubstrate& substrate);

  // The array, where its elements lie in order without gaps; else a copy of it that does, made by a
  // command of MLX's. Before anything is said of the next command.
  mx::array contiguous(const mx::array& array);

  // The next command runs after whatever wrote the array.
  void after(const mx::array& array);

  // What the next command runs and works on. All must be said again for every command.
  void kernel(const metal::Kernel& kernel);
  void input(const mx::array& array, int index, int64_t offset_bytes = 0);
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
