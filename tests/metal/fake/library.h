#pragma once

#include <string>

#include "msl/launch.h"
#include "object.h"

namespace quire::fake {

// Kernels compiled for the CPU, found by name: a text is only looked through for their names.
class Library final : public Object {
 public:
  explicit Library(std::string text) : Object("MTLLibrary"), text_(std::move(text)) {}
  Object* new_function(Object* name);

 private:
  const std::string text_;
};

class Function final : public Object {
 public:
  explicit Function(const msl_kernel* kernel) : Object("MTLFunction"), kernel_(kernel) {}
  const msl_kernel* kernel() const { return kernel_; }

 private:
  const msl_kernel* const kernel_;
};

class Pipeline final : public Object {
 public:
  explicit Pipeline(const msl_kernel* kernel)
      : Object("MTLComputePipelineState"), kernel_(kernel) {}
  const msl_kernel* kernel() const { return kernel_; }
  uint64_t max_threads() const { return kernel_->max_threads; }
  uint64_t simd_width() const { return 32; }

 private:
  const msl_kernel* const kernel_;
};

}  // namespace quire::fake
