#pragma once
#include <Metal/Metal.hpp>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

// A device as the substrate meets it: whether it answers in time, and the objects that it makes.
namespace quire::metal {

// Whether the device has answered everything in time. Once it has not, what is mapped is in doubt:
// nothing more is asked of it and nothing is released, because on a Mac a paging mistake can take
// the whole machine down.
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
