#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "ops/packed_linear.h"

// A model's layers over packed weights, and the choice of its tokens, on the CPU. All numbers are
// float32.
namespace quire::ops {

// x [R, ...], of `inputs` numbers a row -> [R, outputs]: of the rows' RMS norm where its weight is
// given, and plus `residual` [R, outputs] where there is one.
mx::array linear(
    const mx::array& x, const Packed& packed, const Workers& workers,
    const std::optional<mx::array>& norm, double eps, const std::optional<mx::array>& residual);

// The same, whose outputs are heads: an array [R, count, outputs / all counts] for each count.
std::vector<mx::array> linear_heads(
    const mx::array& x, const Packed& packed, const Workers& workers,
    const std::vector<int64_t>& heads, const std::optional<mx::array>& norm, double eps,
    const std::optional<mx::array>& residual);

// x + down(SiLU(gate) * up), of the RMS norm of x [R, hidden]. gate_up: both as one layer, the
// gates first.
mx::array gated_mlp(
    const mx::array& x, const mx::array& norm, double eps, const Packed& gate_up,
    const Packed& down, const Workers& workers);

// gate_up and down of an expert that computes all rows.
using SharedExpert = std::optional<std::pair<Packed, Packed>>;

// A mixture of experts: x + the sum of weight * down(SiLU(gate) * up) over the experts that the
// router chooses for each row, the best one first, of the RMS norm of x [R, hidden]; plus the
// shared expert's, times the sigmoid of its gate. router: an output for each expert, and behind
// them the gate of the shared one. The weights are the softmax over all experts, and are divided by
// the sum of the chosen ones' where they are to be normalised.
mx::array mixture_mlp(
    const mx::array& x, const mx::array& norm, double eps, const Packed& router,
    const PackedStack& gate_up, const PackedStack& down, int64_t chosen, bool normalised,
    const SharedExpert& shared, const Workers& workers);

// x [R, n], each row divided by its root mean square and multiplied with the weight.
mx::array rms_norm(
    const mx::array& x, const mx::array& weight, double eps, const Workers& workers);

// ids [T] int32 -> rows [T, inputs] of the layer, as an embedding has them. What an id is, is known
// when it is evaluated, and an error of then would end the whole step: the row of an id outside of
// the layer's outputs is NaN, which ends the one request that it belongs to.
mx::array packed_rows(const mx::array& ids, const Packed& packed, const Workers& workers);

// The tokens of R rows over V numbers each: (ids [R] int32, finite [R] bool). raw: [R, V] float32,
// as the model gave them; finite says whether all of a row are numbers, and the id of one that is
// not is 0. adjusted: [R, V] float32, of which the ids are chosen; may be raw itself.
// choices: [R, 5] float32: temperature, top_k, top_p, min_p, draw.
std::pair<mx::array, mx::array> choose_tokens(
    const mx::array& raw, const mx::array& adjusted, const mx::array& choices,
    const Workers& workers);

// Throw std::invalid_argument unless x is float32 rows of so many numbers, or a norm's weight is of
// them.
void check_floats(const char* name, const mx::array& x, size_t row_numbers);
void check_norm(const mx::array& weight, size_t numbers);

}  // namespace quire::ops
