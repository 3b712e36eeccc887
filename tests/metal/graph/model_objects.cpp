#include "model_objects.h"

#include <utility>

#include "mlx/stream.h"
#include "mlx_model.h"
#include "recorder.h"
#include "stream_work.h"

namespace quire::graph {
namespace {

constexpr uint64_t kMostBytes = 4096;

const auto defined = [] {
  using fake::define;
  define("GraphFence");
  define("GraphComputeEncoder")
      .method<&ComputeEncoder::set_pipeline>("setComputePipelineState:")
      .method<&ComputeEncoder::set_bytes>("setBytes:length:atIndex:")
      .method<&ComputeEncoder::use_resources>("useResources:count:usage:");
  define("GraphCommandBuffer")
      .method<&CommandBuffer::command_queue>("commandQueue")
      .method<&CommandBuffer::encode_signal>("encodeSignalEvent:value:");
  return true;
}();

// A queue that nothing runs on.
fake::CommandQueue* other_queue() {
  static auto* const queue = new fake::CommandQueue;
  return queue;
}

}  // namespace

void ComputeEncoder::set_pipeline(fake::Pipeline* pipeline) {
  if (Recorder::instance().call("set_compute_pipeline_state") != "drop") {
    this->pipeline = pipeline;
  }
}

void ComputeEncoder::set_bytes(const void* bytes, uint64_t count, uint64_t index) {
  Recorder& recorder = Recorder::instance();
  if (count > kMostBytes) {
    recorder.report("setBytes with " + std::to_string(count) + " bytes");
  }
  if (recorder.call("set_bytes") != "drop") {
    const auto* const first = static_cast<const std::byte*>(bytes);
    bindings.at(index) = {nullptr, nullptr, 0, std::vector<std::byte>(first, first + count)};
  }
}

void ComputeEncoder::use_resources(fake::Buffer* const* resources, uint64_t count, uint64_t) {
  if (Recorder::instance().call("useResources") != "drop") {
    told.insert(resources, resources + count);
  }
}

fake::Object* CommandBuffer::command_queue() {
  return Recorder::instance().call("commandQueue") == "drop" ? other_queue() : queue_;
}

void CommandBuffer::encode_signal(fake::Event* event, uint64_t value) {
  Recorder& recorder = Recorder::instance();
  if (recorder.call("encodeSignalEvent") == "drop") {
    return;
  }
  if (encoder_is_open()) {
    recorder.report("an event was signalled inside of an encoder");
    return;
  }
  const std::string what = "the value " + std::to_string(value) + " is signalled";
  recorder.signalled(event, value, recorder.timeline.signal(encoders, what));
  signal_later(model_stream(), queue_, event, value);
}

}  // namespace quire::graph
