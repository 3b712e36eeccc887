#include "stream_work.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

#include "encode.h"
#include "fake/fake_metal.h"
#include "mlx/backend/cpu/encoder.h"
#include "recorder.h"

namespace quire::graph {
namespace {

// Where that is what a planted mistake is about, what the host let go of too early is gone by then.
constexpr std::chrono::milliseconds kHostGoesFirst{2};

NS::SharedPtr<NS::AutoreleasePool> new_pool() {
  return NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
}

NS::SharedPtr<MTL::CommandBuffer> new_commands(fake::CommandQueue* queue) {
  return NS::RetainPtr(
      reinterpret_cast<MTL::CommandQueue*>(queue)->commandBufferWithUnretainedReferences());
}

std::vector<fake::Access> accesses_of(const KernelRun& run) {
  std::vector<fake::Access> accesses;
  for (const Touch& touch : run.rows) {
    accesses.push_back({touch.address, touch.bytes, touch.write});
  }
  return accesses;
}

// What a kernel would do with addresses that are nobody's ends the process: it is looked at before.
bool addresses_are_good(const KernelRun& run) {
  fake::Machine& machine = fake::Machine::current();
  const std::lock_guard lock(machine.mutex);
  const size_t before = machine.errors().size();
  for (const fake::Access& access : accesses_of(run)) {
    fake::touched_by(access, run.kernel->host_name);
  }
  return machine.errors().size() == before;
}

// A device's arrays begin at addresses that suit every vector; those of MLX's CPU allocator do not.
// Where one does not, the kernel works on a copy.
class AlignedArgument {
 public:
  explicit AlignedArgument(const KernelArgument& argument) : argument_(argument) {
    const bool aligned = reinterpret_cast<uintptr_t>(argument.address) % kAlignment == 0;
    if (!argument.bytes.empty()) {
      address_ = const_cast<std::byte*>(argument.bytes.data());
    } else if (aligned || in_device_memory(argument.address)) {
      address_ = argument.address;
    } else {
      copy_.reset(static_cast<std::byte*>(std::aligned_alloc(
          kAlignment, (argument.array_bytes + kAlignment - 1) / kAlignment * kAlignment)));
      std::memcpy(copy_.get(), argument.address, argument.array_bytes);
      address_ = copy_.get();
    }
  }
  void* address() const { return address_; }
  void give_back() const {
    if (copy_ != nullptr && argument_.written) {
      std::memcpy(argument_.address, copy_.get(), argument_.array_bytes);
    }
  }

 private:
  static constexpr size_t kAlignment = 16;
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  const KernelArgument& argument_;
  void* address_;
  std::unique_ptr<std::byte, Free> copy_;
};

void launch(const KernelRun& run) {
  std::vector<AlignedArgument> arguments;
  std::vector<void*> buffers;
  std::map<const void*, void*> given;  // an array that is bound twice is copied once
  for (const KernelArgument& argument : run.arguments) {
    if (argument.bytes.empty() && given.contains(argument.address)) {
      buffers.push_back(given[argument.address]);
      continue;
    }
    arguments.emplace_back(argument);
    buffers.push_back(arguments.back().address());
    given[argument.address] = buffers.back();
  }
  const auto start =
      run.counts_threads ? run.kernel->over_threads : run.kernel->over_threadgroups;
  unsigned grid[3];
  unsigned threads[3];
  std::copy_n(run.grid, 3, grid);
  std::copy_n(run.threads, 3, threads);
  start(buffers.data(), grid, threads);
  for (const AlignedArgument& argument : arguments) {
    argument.give_back();
  }
}

void run_now(fake::CommandQueue* queue, const KernelRun& run) {
  Recorder& recorder = Recorder::instance();
  if (recorder.planted().call == "add_temporary") {
    std::this_thread::sleep_for(kHostGoesFirst);
  }
  const std::string name = run.kernel->host_name;
  for (const KernelArgument& argument : run.arguments) {
    if (argument.bytes.empty() && argument.array.expired()) {
      recorder.report("an array that " + name + " uses was freed before it had run");
      return;
    }
  }
  if (!addresses_are_good(run)) {
    return;
  }
  const auto pool = new_pool();
  const auto commands = new_commands(queue);
  reinterpret_cast<fake::CommandBuffer*>(commands.get())
      ->encode(name, accesses_of(run), [&run] { launch(run); }, run.bound);
  commands->commit();
  commands->waitUntilCompleted();
}

}  // namespace

void run_later(const mlx::core::Stream& stream, fake::CommandQueue* queue, KernelRun run) {
  auto kept = std::make_shared<const KernelRun>(std::move(run));
  mlx::core::cpu::get_command_encoder(stream).dispatch(
      [queue, kept = std::move(kept)] { run_now(queue, *kept); });
}

void signal_later(
    const mlx::core::Stream& stream, fake::CommandQueue* queue, fake::Event* event,
    uint64_t value) {
  mlx::core::cpu::get_command_encoder(stream).dispatch([queue, event, value] {
    const auto pool = new_pool();
    const auto commands = new_commands(queue);
    commands->encodeSignalEvent(reinterpret_cast<MTL::SharedEvent*>(event), value);
    commands->commit();
    commands->waitUntilCompleted();
  });
}

}  // namespace quire::graph
