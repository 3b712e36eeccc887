#pragma once

#include <Metal/Metal.hpp>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/metal/kernel_text.h"

// A GPU as the substrate meets it: its abilities, whether it answers in time, and its objects.
namespace quire::metal {

// Throws std::invalid_argument that lists the names.
Kind kind_named(const std::string& name);

// The abilities of a device. They are asked of the device itself, and never derived from a version
// of the system: a virtual machine's device lacks abilities that its system has.
struct Capabilities {
  // Makes a queue, an event and the like, asks them, and lets go of them.
  static Capabilities probe(MTL::Device* device);

  std::string name;
  std::vector<std::string> families;  // "apple7", "metal3", ...
  uint64_t max_buffer_bytes = 0;
  uint64_t recommended_working_set_bytes = 0;
  bool unified_memory = false;
  bool residency_sets = false;
  // The device's own word; nothing where the system is too old for the question.
  std::optional<bool> placement_sparse;
  // Messages that objects of this device do not answer, or objects that it does not make, in words.
  struct Missing {
    Kind needed_by;
    std::string what;
  };
  std::vector<Missing> missing;

  // Everything that a substrate of this kind needs and that is not there; empty where it can be
  // tried.
  std::vector<std::string> missing_for(Kind kind) const;
};

// A device as the substrate meets it: whether it answers in time, and the objects that it makes.

// Records whether the device has answered everything in time. After a failure the state of mappings
// is in doubt: the device gets no more work and nothing is released, because on a Mac a paging
// mistake can take the whole machine down.
class Health {
 public:
  explicit Health(std::chrono::nanoseconds timeout) : timeout_(timeout) {}

  // How long the device may take for one thing.
  std::chrono::nanoseconds timeout() const { return timeout_; }
  // Keeps the first failure for good, and throws this one as std::runtime_error.
  [[noreturn]] void fail(const std::string& what);
  // The same for something that the device did not finish within the time limit.
  [[noreturn]] void time_out(const std::string& what);
  // Throws std::runtime_error where something has failed.
  void require() const;
  std::string failure() const;

 private:
  const std::chrono::nanoseconds timeout_;
  mutable std::mutex mutex_;
  std::string failure_;
};

// Holds the objects that Metal releases by itself, until the caller's block ends.
NS::SharedPtr<NS::AutoreleasePool> new_pool();

// Throws std::system_error(ENOMEM) that names the object that the device refuses.
[[noreturn]] void refuse_memory(const std::string& object);

// A buffer that the CPU reaches, too; untracked, as MLX's own are: kernels reach rows by address.
// Throws std::system_error(ENOMEM) where the device refuses.
NS::SharedPtr<MTL::Buffer> make_shared_buffer(MTL::Device* device, size_t bytes);
NS::SharedPtr<MTL::SharedEvent> make_shared_event(MTL::Device* device);

// False when the time passed before the event had that value.
bool wait_for_value(
    MTL::SharedEvent* event, uint64_t value, std::chrono::nanoseconds timeout);

}  // namespace quire::metal
