#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/packed_linear.h"

// A model's layers over packed weights, and the choice of tokens, on a CPU. All numbers are
// float32. metal_ext/_ext.pyi documents the operations.
namespace quire::ops {

mx::array linear(
    const mx::array& x, const Packed& packed, const Workers& workers,
    const std::optional<mx::array>& norm, double eps, const std::optional<mx::array>& residual);

std::vector<mx::array> linear_heads(
    const mx::array& x, const Packed& packed, const Workers& workers,
    const std::vector<int64_t>& heads, const std::optional<mx::array>& norm, double eps,
    const std::optional<mx::array>& residual);

mx::array gated_mlp(
    const mx::array& x, const mx::array& norm, double eps, const Packed& gate_up,
    const Packed& down, const Workers& workers, const std::string& gate, bool adds);

// The weights (gate_up, down) of the shared expert, which computes all rows, if there is one.
using SharedExpert = std::optional<std::pair<Packed, Packed>>;

// The biases, float32, of the router [experts], of gate and up [experts, 2 * inner], and of down
// [experts, hidden].
using MixtureBiases = std::optional<std::tuple<mx::array, mx::array, mx::array>>;

mx::array mixture_mlp(
    const mx::array& x, const mx::array& norm, double eps, const Packed& router,
    const PackedStack& gate_up, const PackedStack& down, int64_t chosen, bool normalised,
    const SharedExpert& shared, const Workers& workers, const std::string& gate,
    const MixtureBiases& biases);

mx::array rms_norm(
    const mx::array& x, const mx::array& weight, double eps, const Workers& workers,
    const std::optional<mx::array>& residual);

mx::array packed_rows(const mx::array& ids, const Packed& packed, const Workers& workers);

std::pair<mx::array, mx::array> choose_tokens(
    const mx::array& raw, const mx::array& adjusted, const mx::array& choices,
    const mx::array& noise_keys, const mx::array& noise, const Workers& workers);

// Throws std::invalid_argument unless x is float32 [rows][row_numbers].
void check_floats(const char* name, const mx::array& x, size_t row_numbers);
// Throws std::invalid_argument unless the weight is float32 [numbers].
void check_norm(const mx::array& weight, size_t numbers);

}  // namespace quire::ops
