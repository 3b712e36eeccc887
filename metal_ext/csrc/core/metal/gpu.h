#pragma once

#include <Metal/Metal.hpp>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/metal/kernel_text.h"

// What quire needs of a GPU: its abilities, its failures, and the objects that it makes.
namespace quire::metal {

Kind kind_named(const std::string& name);

// The abilities of a device. The device itself is queried, because the device of a virtual machine
// may lack abilities that the system's version implies.
struct Capabilities {
  // Queries the device, and makes and releases some objects to query them as well.
  static Capabilities probe(MTL::Device* device);

  std::string name;
  std::vector<std::string> families;  // "apple7", "metal3", ...
  uint64_t max_buffer_bytes = 0;
  uint64_t recommended_working_set_bytes = 0;
  bool unified_memory = false;
  bool residency_sets = false;
  // Whether the device has placement sparse buffers, or empty if the system is too old to say.
  std::optional<bool> placement_sparse;
  // A method that an object of the device lacks, or an object that the device cannot make.
  struct Missing {
    Kind needed_by;
    std::string what;
  };
  std::vector<Missing> missing;

  // Returns everything that the device lacks for this kind of memory.
  std::vector<std::string> missing_for(Kind kind) const;
};

// Records the first failure or timeout of the device. After that, mappings may be wrong. So the
// device gets no more work, and nothing is released: a mistake in mappings can crash a Mac.
class Health {
 public:
  explicit Health(std::chrono::nanoseconds timeout) : timeout_(timeout) {}

  std::chrono::nanoseconds timeout() const { return timeout_; }
  // Records the failure, unless there is one already. Throws `what` as std::runtime_error.
  [[noreturn]] void fail(const std::string& what);
  // Calls fail() for a command that did not finish within the time limit.
  [[noreturn]] void time_out(const std::string& what);
  void require() const;
  std::string failure() const;

 private:
  const std::chrono::nanoseconds timeout_;
  mutable std::mutex mutex_;
  std::string failure_;
};

// Returns a pool that releases Metal's temporary objects at the end of the caller's scope.
NS::SharedPtr<NS::AutoreleasePool> new_pool();

// Throws std::system_error(ENOMEM) with the name of the refused object.
[[noreturn]] void refuse_memory(const std::string& object);

// Makes a buffer that the CPU can access as well. Metal does not track uses of the buffer, because
// kernels use its address. Throws std::system_error(ENOMEM) if the device refuses.
NS::SharedPtr<MTL::Buffer> make_shared_buffer(MTL::Device* device, size_t bytes);
NS::SharedPtr<MTL::SharedEvent> make_shared_event(MTL::Device* device);

bool wait_for_value(
    MTL::SharedEvent* event, uint64_t value, std::chrono::nanoseconds timeout);

}  // namespace quire::metal
