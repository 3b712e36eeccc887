#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "accesses.h"
#include "fake/commands.h"
#include "mlx/array.h"
#include "mlx/stream.h"

// What MLX's CPU stream does where a device would run a command: hands it to the fake device, on the
// queue of MLX's encoder, and waits. So it runs behind all of MLX's own work that comes before it,
// and under all rules of the fake.
namespace quire::graph {

struct KernelArgument {
  void* address;  // null where bytes are bound
  std::weak_ptr<mlx::core::array::Data> array;
  size_t array_bytes;  // from the address on
  bool written;
  std::vector<std::byte> bytes;
};

struct KernelRun {
  const msl_kernel* kernel;
  bool counts_threads;
  uint64_t grid[3];
  uint64_t threads[3];
  std::vector<KernelArgument> arguments;  // by index; their arrays must live until it has run
  std::vector<Touch> rows;                // of K and V
  std::set<const fake::Allocation*> bound;
};

void run_later(const mlx::core::Stream& stream, fake::CommandQueue* queue, KernelRun run);
void signal_later(
    const mlx::core::Stream& stream, fake::CommandQueue* queue, fake::Event* event,
    uint64_t value);

}  // namespace quire::graph
