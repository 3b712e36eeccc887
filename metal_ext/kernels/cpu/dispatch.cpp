#include "cpu/dispatch.h"

#include <stdexcept>

#include "cpu/head_dims.h"

namespace quire::cpu {

#if defined(__x86_64__)
namespace avx512 { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace sse2 { extern const Kernels kernels; }
#else
namespace neon { extern const Kernels kernels; }
#endif

namespace {

std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    found.push_back(&avx512::kernels);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    found.push_back(&avx2::kernels);
  }
  found.push_back(&sse2::kernels);
#else
  found.push_back(&neon::kernels);
#endif
  return found;
}

}  // namespace

std::vector<std::string> available() {
  std::vector<std::string> names;
  for (const Kernels* kernels : usable()) {
    names.emplace_back(kernels->name);
  }
  return names;
}

const Kernels& select(const std::string& name) {
  std::string known;
  for (const Kernels* kernels : usable()) {
    if (name == "auto" || name == kernels->name) {
      return *kernels;
    }
    known += std::string(known.empty() ? "" : ", ") + kernels->name;
  }
  throw std::invalid_argument(
      "instruction set '" + name + "' is not to be had on this machine; there is: " + known);
}

bool supports_head_dim(size_t head_dim) {
  bool found = false;
  for_head_dim(head_dim, [&](auto) { found = true; });
  return found;
}

}  // namespace quire::cpu
