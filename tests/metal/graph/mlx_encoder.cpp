// MLX's encoder, as its header has it and as MLX 0.32.4 does it, over objects that only take notes:
// which arrays commands read and write, where that puts barriers, and which fences an encoder waits
// for. quire's operations are compiled against MLX's own header and cannot tell the difference.
#include "mlx/backend/metal/device.h"

#include <stdexcept>
#include <utility>

#include "encode.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx_model.h"
#include "recorder.h"

namespace mlx::core::metal {
namespace {

using quire::graph::as_metal;
using quire::graph::from_metal;
using quire::graph::Recorder;

Recorder& recorder() { return Recorder::instance(); }

template <class Metal>
quire::graph::ComputeEncoder& model(const NS::SharedPtr<Metal>& encoder) {
  return from_metal<quire::graph::ComputeEncoder>(encoder.get());
}

MTL::Resource* resource_of(const array& a) {
  return static_cast<MTL::Resource*>(const_cast<void*>(a.buffer().ptr()));
}

}  // namespace

CommandEncoder::CommandEncoder(Device& device, int, ResidencySets& residency_sets)
    : device_(device),
      queue_(NS::TransferPtr(device.mtl_device()->newCommandQueue())),
      residency_sets_(residency_sets) {
  const quire::graph::Quietly quietly;
  commit();
}

CommandEncoder::~CommandEncoder() = default;

MTL::ComputeCommandEncoder* CommandEncoder::get_command_encoder() {
  if (!encoder_) {
    const quire::graph::Encoder number = recorder().timeline.open_encoder();
    encoder_ = NS::TransferPtr(
        as_metal<MTL::ComputeCommandEncoder>(new quire::graph::ComputeEncoder(number)));
    fence_ = NS::TransferPtr(as_metal<MTL::Fence>(new quire::graph::Fence(number)));
    ++recorder().counts.encoders;
  }
  return encoder_.get();
}

void CommandEncoder::set_input_array(const array& a, int index, int64_t offset) {
  if (recorder().call("set_input_array") == "drop") {
    return;
  }
  get_command_encoder();
  MTL::Resource* const resource = resource_of(a);
  all_inputs_.insert(resource);
  next_inputs_.insert(resource);
  needs_barrier_ |= prev_outputs_.contains(resource);
  model(encoder_).used.emplace(resource, a.data_shared_ptr().get());
  bind(model(encoder_), a, index, offset);
}

void CommandEncoder::set_output_array(array& a, int index, int64_t offset) {
  const std::string how = recorder().call("set_output_array");
  const quire::graph::Quietly quietly;
  if (how == "drop") {
    return;
  }
  if (how == "register") {
    get_command_encoder();
    bind(model(encoder_), a, index, offset);
  } else {
    set_input_array(a, index, offset);
  }
  if (how != "input") {
    register_output_array(a);
  }
}

void CommandEncoder::register_output_array(const array& a) {
  if (recorder().call("register_output_array") == "drop") {
    return;
  }
  MTL::Resource* const resource = resource_of(a);
  all_outputs_.insert(resource);
  next_outputs_.insert(resource);
  needs_barrier_ |= prev_inputs_.contains(resource);
}

void CommandEncoder::add_temporary(array temporary) {
  if (recorder().call("add_temporary") != "drop") {
    temporaries_.push_back(std::move(temporary));
  }
}

void CommandEncoder::maybeInsertBarrier() {
  if (needs_barrier_) {
    recorder().timeline.barrier();
    ++recorder().counts.barriers;
    prev_inputs_ = std::move(next_inputs_);
    prev_outputs_ = std::move(next_outputs_);
  } else {
    prev_inputs_.merge(next_inputs_);
    prev_outputs_.merge(next_outputs_);
  }
  needs_barrier_ = false;
  next_inputs_.clear();
  next_outputs_.clear();
}

void CommandEncoder::dispatch_threadgroups(MTL::Size grid, MTL::Size group) {
  if (recorder().call("dispatch_threadgroups") == "drop") {
    return;
  }
  get_command_encoder();
  maybeInsertBarrier();
  encode(model(encoder_), from_metal<quire::graph::CommandBuffer>(buffer_.get()), grid, group,
         false);
}

void CommandEncoder::dispatch_threads(MTL::Size grid, MTL::Size group) {
  if (recorder().call("dispatch_threads") == "drop") {
    return;
  }
  get_command_encoder();
  maybeInsertBarrier();
  encode(model(encoder_), from_metal<quire::graph::CommandBuffer>(buffer_.get()), grid, group,
         true);
}

void CommandEncoder::end_encoding(bool wait_in_flight) {
  const std::string how = recorder().call("end_encoding");
  if (how == "drop" || !encoder_) {
    return;
  }
  // MLX's CPU frees memory as soon as it has run, and another array may get it within one encoder.
  auto& used = model(encoder_).used;
  for (const array& temporary : temporaries_) {
    const void* const buffer = temporary.buffer().ptr();
    used.erase({buffer, temporary.data_shared_ptr().get()});
    if (const auto next = used.lower_bound({buffer, nullptr});
        next == used.end() || next->first != buffer) {
      all_inputs_.erase(buffer);
      all_outputs_.erase(buffer);
    }
  }
  std::set<quire::graph::Encoder> waits;
  std::erase_if(prev_ce_outputs_, [](const auto& output) {
    return recorder().timeline.completed(
        from_metal<quire::graph::Fence>(output.second.get()).encoder);
  });
  for (const auto& [buffer, fence] : prev_ce_outputs_) {
    if (all_inputs_.contains(buffer) || (wait_in_flight && how != "no wait")) {
      waits.insert(from_metal<quire::graph::Fence>(fence.get()).encoder);
    }
  }
  recorder().counts.waits += waits.size();
  recorder().timeline.close_encoder(waits);
  from_metal<quire::graph::CommandBuffer>(buffer_.get())
      .encoders.insert(model(encoder_).encoder);
  for (const void* output : all_outputs_) {
    prev_ce_outputs_[output] = fence_;
  }
  // MLX keeps them until the command buffer has completed.
  cpu::get_command_encoder(quire::graph::model_stream())
      .add_temporaries(std::exchange(temporaries_, {}));
  encoder_.reset();
  needs_barrier_ = false;
  for (auto* resources : {&prev_inputs_, &next_inputs_, &prev_outputs_, &next_outputs_}) {
    resources->clear();
  }
  all_inputs_.clear();
  all_outputs_.clear();
}

void CommandEncoder::commit(std::function<void()>) {
  if (recorder().call("commit"); !recorder().quiet()) {
    recorder().report("a command buffer was committed inside of an evaluation");
  }
  auto* const queue = &from_metal<quire::fake::CommandQueue>(queue_.get());
  buffer_ = NS::TransferPtr(
      as_metal<MTL::CommandBuffer>(new quire::graph::CommandBuffer(queue)));
  ++recorder().counts.command_buffers;
}

}  // namespace mlx::core::metal
