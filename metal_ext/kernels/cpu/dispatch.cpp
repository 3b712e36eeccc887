#include "cpu/dispatch.h"

#include <stdexcept>

#if defined(__linux__) && defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

// Chooses the kernels' instruction set at run time.
namespace quire::cpu {

#if defined(__x86_64__)
namespace amx { extern const Kernels kernels; }
namespace bf16 { extern const Kernels kernels; }
namespace vnni { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace sse2 { extern const Kernels kernels; }
#else
namespace dotprod { extern const Kernels kernels; }
namespace neon { extern const Kernels kernels; }
#endif

namespace {

// Returns true if this process may use AMX tiles for bfloat16 and bytes. Checks the processor
// (CPUID leaf 7, EDX bits 22, 24, 25), then requests the tiles from Linux (ARCH_REQ_XCOMP_PERM).
#if defined(__x86_64__)
bool may_use_tiles() {
#if defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kAll = 1u << 22 | 1u << 24 | 1u << 25;
  constexpr long kRequest = 0x1023, kTileData = 18;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAll) == kAll &&
         syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#else
// Returns true if the processor can add products of bytes (Armv8.2's DotProd). Every arm64 Mac can.
bool has_dots() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return true;
#endif
}
#endif

std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    if (__builtin_cpu_supports("avx512vnni")) {
      if (may_use_tiles()) {
        found.push_back(&amx::kernels);
      }
      if (__builtin_cpu_supports("avx512bf16")) {
        found.push_back(&bf16::kernels);
      }
      found.push_back(&vnni::kernels);
    }
    found.push_back(&avx512::kernels);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    found.push_back(&avx2::kernels);
  }
  found.push_back(&sse2::kernels);
#else
  if (has_dots()) {
    found.push_back(&dotprod::kernels);
  }
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

Activations activations_of(const std::string& name) {
  if (name == "float32") {
    return Activations::float32;
  }
  if (name == "bfloat16") {
    return Activations::bfloat16;
  }
  if (name == "int8") {
    return Activations::int8;
  }
  throw std::invalid_argument("activations are float32, bfloat16 or int8, not '" + name + "'");
}

Gate gate_of(const std::string& name) {
  if (name == "silu") {
    return Gate::silu;
  }
  if (name == "gelu_tanh") {
    return Gate::gelu_tanh;
  }
  if (name == "clamped_silu") {
    return Gate::clamped_silu;
  }
  throw std::invalid_argument("a gate is silu, gelu_tanh or clamped_silu, not '" + name + "'");
}

bool supports_head_dim(size_t head_dim) {
  bool found = false;
  for_head_dim(head_dim, [&](auto) { found = true; });
  return found;
}

}  // namespace quire::cpu
