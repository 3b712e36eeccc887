#pragma once

#include <string>
#include <vector>

#include "cpu/kernels.h"

// Chooses one of the instruction sets for which the CPU kernels are compiled.
namespace quire::cpu {

// Returns the instruction sets that this machine can run, the best one first: "amx", "bf16",
// "vnni", "avx512", "avx2", "sse2" on x86-64; "dotprod", "neon" on arm64.
std::vector<std::string> available();

// Throws std::invalid_argument unless `name` is in available() or "auto", which means the best set.
const Kernels& select(const std::string& name);

// Converts "float32", "bfloat16" or "int8". Throws std::invalid_argument for other names.
Activations activations_of(const std::string& name);

// Converts "silu", "gelu_tanh" or "clamped_silu". Throws std::invalid_argument for other names.
Gate gate_of(const std::string& name);

// Returns true if the kernels were built for heads of `head_dim` dimensions.
bool supports_head_dim(size_t head_dim);

}  // namespace quire::cpu
