#include "encode.h"

#include <algorithm>
#include <string>
#include <utility>

#include "mlx_model.h"
#include "recorder.h"
#include "stream_work.h"

namespace quire::graph {
namespace {

void* address_of(const mlx::core::array& array, int64_t offset) {
  return static_cast<std::byte*>(const_cast<void*>(array.data<void>())) + offset;
}

// What every kernel needs. Reports what is missing.
bool is_complete(const ComputeEncoder& encoder) {
  Recorder& recorder = Recorder::instance();
  if (encoder.pipeline == nullptr) {
    recorder.report("a command has no kernel");
    return false;
  }
  const std::string name = encoder.pipeline->kernel()->host_name;
  for (int i = 0; i < bindings_of(name).count; ++i) {
    const Binding& binding = encoder.bindings[static_cast<size_t>(i)];
    if (binding.address == nullptr && binding.bytes.empty()) {
      recorder.report(name + " has nothing bound at index " + std::to_string(i));
      return false;
    }
  }
  return true;
}

KernelRun run_of(const ComputeEncoder& encoder, MTL::Size grid, MTL::Size threads) {
  KernelRun run{.kernel = encoder.pipeline->kernel(),
                .counts_threads = false,
                .grid = {grid.width, grid.height, grid.depth},
                .threads = {threads.width, threads.height, threads.depth},
                .arguments = {},
                .rows = {},
                .bound = encoder.told};
  std::vector<void*> readable;
  const Bindings& bindings = bindings_of(run.kernel->host_name);
  for (int i = 0; i < bindings.count; ++i) {
    const Binding& binding = encoder.bindings[static_cast<size_t>(i)];
    const bool written =
        std::find(bindings.writes.begin(), bindings.writes.end(), i) != bindings.writes.end();
    run.arguments.push_back({.address = binding.address,
                             .array = binding.data,
                             .array_bytes = binding.data_bytes,
                             .written = written,
                             .bytes = binding.bytes});
    readable.push_back(binding.bytes.empty() ? binding.address
                                             : const_cast<std::byte*>(binding.bytes.data()));
  }
  run.rows = rows_touched(run.kernel->host_name, readable.data(), run.grid);
  return run;
}

void note(const ComputeEncoder& encoder, const KernelRun& run) {
  Recorder& recorder = Recorder::instance();
  const std::string name = run.kernel->host_name;
  const Command command = recorder.timeline.add(name);
  for (const Touch& touch : run.rows) {
    if (touch.write) {
      recorder.timeline.writes(command, touch.address, touch.bytes);
    } else {
      recorder.timeline.reads(command, touch.address, touch.bytes);
    }
  }
  const Bindings& bindings = bindings_of(name);
  for (int i = 0; i < bindings.count; ++i) {
    if (const auto& data = encoder.bindings[static_cast<size_t>(i)].data; data != nullptr) {
      recorder.array_read(data, command);
    }
  }
  for (const int i : bindings.writes) {
    recorder.array_written(encoder.bindings[static_cast<size_t>(i)].data, command);
  }
}

}  // namespace

bool in_device_memory(const void* address) {
  fake::Machine& machine = fake::Machine::current();
  const std::lock_guard lock(machine.mutex);
  const auto at = reinterpret_cast<uint64_t>(address);
  const auto after = machine.addresses.upper_bound(at);
  return after != machine.addresses.begin() &&
         at - std::prev(after)->first < std::prev(after)->second->length();
}

void bind(ComputeEncoder& encoder, const mlx::core::array& array, int index, int64_t offset) {
  void* const address = address_of(array, offset);
  if (array.data_size() > 1 && !Recorder::instance().foreign() && in_device_memory(address)) {
    Recorder::instance().report(
        "an array of " + std::to_string(array.data_size()) +
        " elements stands for a buffer: MLX would give its commands away early");
  }
  const size_t elements = std::max(array.data_size(), array.size());  // of a weight that counts none
  const size_t bytes = elements * array.itemsize() - static_cast<size_t>(offset);
  encoder.bindings.at(static_cast<size_t>(index)) = {
      address, array.data_shared_ptr(), bytes, {}};
}

void encode(
    ComputeEncoder& encoder, const CommandBuffer& commands, MTL::Size grid, MTL::Size threads,
    bool counts_threads) {
  if (is_complete(encoder)) {
    KernelRun run = run_of(encoder, grid, threads);
    run.counts_threads = counts_threads;
    note(encoder, run);
    run_later(model_stream(), commands.queue(), std::move(run));
    ++Recorder::instance().counts.commands;
  }
  encoder.pipeline = nullptr;
  encoder.bindings = {};
}

}  // namespace quire::graph
