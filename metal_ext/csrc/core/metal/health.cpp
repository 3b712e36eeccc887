#include "core/metal/health.h"

#include <stdexcept>

namespace quire::metal {

void Health::fail(const std::string& what) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) {
      failure_ = what;
    }
  }
  throw std::runtime_error(what);
}

void Health::time_out(const std::string& what) {
  const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(timeout_);
  fail(
      "the GPU did not finish within " + std::to_string(limit.count()) + " ms: " + what +
      "; quire must end, and start again with the paged or the dense backend");
}

void Health::require() const {
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) {
    throw std::runtime_error(failure_);
  }
}

std::string Health::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace quire::metal
