#include "library.h"

#include "foundation.h"

namespace quire::fake {
namespace {

const auto defined = [] {
  define("MTLLibrary").method<&Library::new_function>("newFunctionWithName:");
  define("MTLFunction");
  define("MTLComputePipelineState")
      .method<&Pipeline::max_threads>("maxTotalThreadsPerThreadgroup")
      .method<&Pipeline::simd_width>("threadExecutionWidth");
  return true;
}();

}  // namespace

Object* Library::new_function(Object* name) {
  const std::string& wanted = static_cast<const String*>(name)->text();
  const msl_kernel* const kernel = find_launcher(wanted.c_str());
  if (kernel == nullptr || text_.find(wanted) == std::string::npos) {
    return nullptr;
  }
  return new Function(kernel);
}

}  // namespace quire::fake
