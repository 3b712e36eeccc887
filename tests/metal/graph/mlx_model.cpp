#include "mlx_model.h"

#include <optional>
#include <stdexcept>

#include "encode.h"
#include "mlx/backend/metal/device.h"
#include "recorder.h"

// The rest of MLX's Metal side: its device, its encoder's owner, and what evaluation does with it.
namespace quire::graph {
namespace {

constexpr int kForeignIndex = 30;  // none that a kernel of ours needs

struct Owner {
  mlx::core::Stream stream;
  mlx::core::metal::CommandEncoder encoder;
};

Owner*& owner() {
  static Owner* only = nullptr;
  return only;
}

mlx::core::metal::CommandEncoder& encoder() {
  if (owner() == nullptr) {
    throw std::logic_error("no operation has asked for MLX's encoder");
  }
  return owner()->encoder;
}

}  // namespace

const mlx::core::Stream& model_stream() { return owner()->stream; }

bool encoder_is_open() {
  // The only encoder that is not closed is the newest.
  return Recorder::instance().timeline.is_open();
}

void end_encoder() {
  if (owner() != nullptr) {
    const Quietly quietly;
    encoder().end_encoding();
  }
}

void next_command_buffer() {
  if (owner() != nullptr) {
    const Quietly quietly;
    encoder().commit();
  }
}

void encode_foreign(
    const mlx::core::Stream& stream, const std::vector<mlx::core::array>& reads,
    mlx::core::array& result) {
  Recorder& recorder = Recorder::instance();
  const Quietly quietly;
  auto& encoder = mlx::core::metal::get_command_encoder(stream);
  for (const mlx::core::array& array : reads) {
    encoder.set_input_array(array, kForeignIndex);
  }
  encoder.set_output_array(result, kForeignIndex);
  encoder.maybeInsertBarrier();
  const Command command = recorder.timeline.add("a command of MLX's");
  for (const mlx::core::array& array : reads) {
    const void* const address = array.data<void>();
    if (in_device_memory(address)) {
      recorder.timeline.reads(command, reinterpret_cast<uint64_t>(address), array.nbytes());
    } else {
      recorder.array_read(array.data_shared_ptr(), command);
    }
  }
  recorder.array_written(result.data_shared_ptr(), command);
}

}  // namespace quire::graph

namespace mlx::core::metal {

CommandEncoder& get_command_encoder(Stream stream) {
  auto*& owner = quire::graph::owner();
  if (owner == nullptr) {
    auto& made = device(mlx::core::Device::gpu);
    owner = new quire::graph::Owner{stream, {made, stream.index, made.residency_sets()}};
  }
  if (owner->stream != stream) {
    throw std::logic_error("operations on a second stream are not modelled");
  }
  return owner->encoder;
}

ResidencySets::ResidencySets(MTL::Device* device) : device_(device) {}
ResidencySets::~ResidencySets() = default;

Device& device(mlx::core::Device) {
  static auto* const only = new Device;
  return *only;
}

}  // namespace mlx::core::metal
