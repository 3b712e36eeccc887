#pragma once

#include <Metal/Metal.hpp>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/metal/kernel_text.h"

// The GPU for quire's device memory: its abilities, its failures, and the objects that it makes.
namespace quire::metal {

Kind kind_named(const std::string& name);

// A device's abilities, asked of the device itself, because a virtual machine's device may lack
// abilities of its system's version.
struct Capabilities {
  // Makes and releases objects, such as a queue and an event, to ask for their abilities.
  static Capabilities probe(MTL::Device* device);

  std::string name;
  std::vector<std::string> families;  // "apple7", "metal3", ...
  uint64_t max_buffer_bytes = 0;
  uint64_t recommended_working_set_bytes = 0;
  bool unified_memory = false;
  bool residency_sets = false;
  // Whether the device has placement sparse buffers; empty if the system is too old to tell.
  std::optional<bool> placement_sparse;
  // A message that an object of the device does not answer, or an object that it cannot make.
  struct Missing {
    Kind needed_by;
    std::string what;
  };
  std::vector<Missing> missing;

  // Returns everything that a backend of this kind needs and the device lacks.
  std::vector<std::string> missing_for(Kind kind) const;
};

// Remembers whether the device failed or timed out. After a failure the mappings are unknown:
// the device gets no more work and nothing is released, because a paging mistake can crash a Mac.
class Health {
 public:
  explicit Health(std::chrono::nanoseconds timeout) : timeout_(timeout) {}

  // The time limit of one command.
  std::chrono::nanoseconds timeout() const { return timeout_; }
  // Keeps the first failure for good. Throws this failure as std::runtime_error.
  [[noreturn]] void fail(const std::string& what);
  // Calls fail() for a command that did not finish within the time limit.
  [[noreturn]] void time_out(const std::string& what);
  // Throws std::runtime_error after a failure.
  void require() const;
  std::string failure() const;

 private:
  const std::chrono::nanoseconds timeout_;
  mutable std::mutex mutex_;
  std::string failure_;
};

// Releases Metal's temporary objects at the end of the caller's scope.
NS::SharedPtr<NS::AutoreleasePool> new_pool();

// Throws std::system_error(ENOMEM) that names the refused object.
[[noreturn]] void refuse_memory(const std::string& object);

// Makes a buffer that the CPU can reach too. Metal does not track uses: kernels go by address.
// Throws std::system_error(ENOMEM) when the device refuses.
NS::SharedPtr<MTL::Buffer> make_shared_buffer(MTL::Device* device, size_t bytes);
NS::SharedPtr<MTL::SharedEvent> make_shared_event(MTL::Device* device);

// Returns false when the timeout passes before the event reaches the value.
bool wait_for_value(
    MTL::SharedEvent* event, uint64_t value, std::chrono::nanoseconds timeout);

}  // namespace quire::metal
