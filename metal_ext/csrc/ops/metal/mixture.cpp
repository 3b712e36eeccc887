#include "ops/metal/mixture.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/checked.h"
#include "metal/arguments.h"
#include "ops/metal/layer_rows.h"
#include "ops/metal/ops.h"

// The experts of a mixture for a few rows, on a GPU.
namespace quire::ops {
namespace {

constexpr int64_t kMostChosen = 32;  // a lane of route holds the weight of one

using Weights = std::shared_ptr<const Mixture>;

// Encodes four commands, each of which reads what the one before has written.
struct MixtureStep {
  Weights weights;
  metal::Kernel route;
  metal::Kernel gates;
  metal::Kernel downs;
  metal::Kernel mix;

  // `in` has x, the residual, the router's output, the shared expert's gate if there is such an
  // expert, and weights to keep.
  void encode(
      Encoder& encoder, const std::vector<mx::array>& in, std::vector<mx::array>& out) const {
    const bool shares = weights->has_shared();
    const mx::array x = encoder.contiguous(in[0]);
    const mx::array residual = encoder.contiguous(in[1]);
    const mx::array logits = encoder.contiguous(in[2]);
    const mx::array opening = shares ? encoder.contiguous(in[3]) : x;
    allocate_on_device(out[0]);
    const auto rows = narrowed<uint32_t>("rows", x.shape(0));
    const uint32_t pairs = rows * weights->chosen;
    const uint32_t all_pairs = pairs + (shares ? rows : 0);
    const uint32_t experts = weights->gate->experts();
    const uint32_t hidden = weights->gate->inputs();
    const metal::RouteArguments routing{
        rows, experts, weights->chosen, weights->normalised ? 1u : 0u, shares ? 1u : 0u,
        most_tiles(rows, pairs, experts, shares)};
    mx::array route_weights = temporary(rows, weights->chosen, mx::float32);
    mx::array order = temporary(all_pairs, 1, mx::uint32);
    mx::array tiles =
        temporary(routing.tiles, sizeof(metal::ExpertTile) / sizeof(uint32_t), mx::uint32);
    mx::array gated = temporary(all_pairs, weights->inner, x.dtype());
    mx::array products = temporary(all_pairs, hidden, mx::float32);

    encoder.kernel(route);
    encoder.input(logits, 0);
    encoder.output(route_weights, 1);
    encoder.output(order, 2);
    encoder.output(tiles, 3);
    encoder.bytes(routing, 4);
    encoder.run_groups(MTL::Size(1, 1, 1));

    const Stored& shared_gate = shares ? weights->shared[0] : weights->gate;
    const Stored& shared_up = shares ? weights->shared[1] : weights->up;
    const Stored& shared_down = shares ? weights->shared[2] : weights->down;
    metal::ExpertArguments arguments{
        hidden, weights->inner, weights->gate->outputs(), experts, pairs, weights->chosen,
        weights->gate->group_shift(), weights->gate->has_bias() ? 1u : 0u, weights->gate_number, 0};
    encoder.kernel(gates);
    encoder.input(x, 0);
    encoder.input(order, 1);
    encoder.input(tiles, 2);
    weights->gate->bind(encoder, 3, 4, 5);
    weights->up->bind(encoder, 6, 7, 8, weights->first_up);
    shared_gate->bind(encoder, 9, 10, 11);
    shared_up->bind(encoder, 12, 13, 14);
    weights->gate->bind_bias(encoder, 15);
    weights->up->bind_bias(encoder, 16, weights->first_up);
    encoder.output(gated, 17);
    encoder.bytes(arguments, 18);
    encoder.run_groups(
        MTL::Size(routing.tiles, tiles_of(weights->inner, metal::kGateOutputs), 1));

    arguments.inputs = weights->inner;
    arguments.outputs = arguments.stride = hidden;
    arguments.group_shift = weights->down->group_shift();
    arguments.added = weights->down->has_bias() ? 1 : 0;
    encoder.kernel(downs);
    encoder.input(gated, 0);
    encoder.input(order, 1);
    encoder.input(tiles, 2);
    weights->down->bind(encoder, 3, 4, 5);
    shared_down->bind(encoder, 6, 7, 8);
    weights->down->bind_bias(encoder, 9);
    encoder.output(products, 10);
    encoder.bytes(arguments, 11);
    encoder.run_groups(
        MTL::Size(routing.tiles, tiles_of(hidden, metal::kProductOutputs), 1));

    const metal::MixArguments mixing{hidden, rows, weights->chosen, shares ? 1u : 0u};
    encoder.kernel(mix);
    encoder.input(products, 0);
    encoder.input(route_weights, 1);
    encoder.input(opening, 2);
    encoder.input(residual, 3);
    encoder.output(out[0], 4);
    encoder.bytes(mixing, 5);
    encoder.run_threads(MTL::Size(hidden / 4, rows, 1));
    for (mx::array* const each : {&route_weights, &order, &tiles, &gated, &products}) {
      encoder.keep(std::move(*each));
    }
  }

  // Returns the number of tiles that any choice of experts fills at most.
  static uint32_t most_tiles(uint32_t rows, uint32_t pairs, uint32_t experts, bool shares) {
    constexpr uint32_t kRows = metal::kTileRows;
    const uint32_t own = (pairs + (kRows - 1) * std::min(pairs, experts)) / kRows;
    return own + (shares ? tiles_of(rows, kRows) : 0);
  }
};

template <class... Parts>
void require_that(bool holds, const Parts&... parts) {
  require<std::invalid_argument>(holds, "no Metal kernel computes this mixture: ", parts...);
}

// Checks one projection's matrices: of a stack, and of the shared expert.
void check_shared(const StoredMatrix& shared, const StoredMatrix& stack, uint32_t outputs) {
  require_that(
      shared.experts() == 1 && shared.shares_format(stack) && shared.outputs() == outputs &&
          !shared.has_bias() && !stack.has_bias(),
      "the shared expert has another format than the others");
}

}  // namespace

Mixture::Mixture(
    const std::vector<std::shared_ptr<StoredMatrix>>& gate_up,
    std::shared_ptr<StoredMatrix> down_projection,
    const std::vector<std::shared_ptr<StoredMatrix>>& shared_expert, int64_t chosen_experts,
    bool normalised_weights, const std::string& kind)
    : down(std::move(down_projection)),
      shared(shared_expert.begin(), shared_expert.end()),
      normalised(normalised_weights),
      gate_number(number_of_gate(kind)) {
  require_that(
      gate_up.size() == 1 || gate_up.size() == 2, gate_up.size(), " stacks of gate and up");
  gate = gate_up.front();
  up = gate_up.back();
  const bool fused = gate_up.size() == 1;
  inner = gate->outputs() / (fused ? 2 : 1);
  first_up = fused ? inner : 0;
  require_that(
      gate->shares_format(*up) && gate->has_bias() == up->has_bias(),
      "gate and up have different formats");
  require_that(
      gate->outputs() == up->outputs() && gate->outputs() == (fused ? 2 : 1) * inner &&
          down->inputs() == inner && down->outputs() == gate->inputs() &&
          up->experts() == gate->experts() && down->experts() == gate->experts(),
      "its stacks have sizes that do not fit");
  require_that(gate->experts() <= metal::kMaxExperts, gate->experts(), " experts");
  checked_between(
      "chosen", chosen_experts, 1, std::min<int64_t>(kMostChosen, gate->experts()));
  chosen = narrowed<uint32_t>("chosen", chosen_experts);
  require_that(shared.empty() || shared.size() == 3, "a shared expert has three matrices");
  for (size_t i = 0; i < shared.size(); ++i) {
    check_shared(*shared[i], i == 2 ? *down : *gate, i == 2 ? down->outputs() : inner);
  }
  for (const Stored& matrix : matrices()) {
    require_that(
        !type || !matrix->type() || *type == *matrix->type(), "its matrices have different types");
    type = matrix->type() ? matrix->type() : type;
  }
}

std::vector<Stored> Mixture::matrices() const {
  std::vector<Stored> all{gate, down};
  if (up != gate) {
    all.push_back(up);
  }
  all.insert(all.end(), shared.begin(), shared.end());
  return all;
}

mx::array device::mixture(
    const mx::array& x, const mx::array& residual, const mx::array& logits,
    const std::shared_ptr<Mixture>& mixture, const std::optional<mx::array>& shared_gate) {
  const auto shape_of = [&x](uint32_t columns) {
    return mx::Shape{x.ndim() == 2 ? x.shape(0) : 0, narrowed<int>("columns", columns)};
  };
  require<std::invalid_argument>(
      x.size() > 0 && x.shape() == shape_of(mixture->gate->inputs()) &&
          residual.shape() == x.shape() && logits.shape() == shape_of(mixture->gate->experts()),
      "x and the residual must be [rows, hidden], and logits [rows, experts]");
  require<std::invalid_argument>(
      shared_gate.has_value() == mixture->has_shared() &&
          (!shared_gate || shared_gate->shape() == shape_of(1)),
      "shared_gate must be [rows, 1] if there is a shared expert, else None");
  checked_between("pairs", int64_t{x.shape(0)} * mixture->chosen, 1, metal::kMaxPairs);
  check_same_type("x", x, "residual", residual);
  std::vector<mx::array> in{x, residual, logits};
  if (shared_gate) {
    check_same_type("x", x, "shared_gate", *shared_gate);
    in.push_back(*shared_gate);
  }
  require<std::invalid_argument>(
      !mixture->type || *mixture->type == x.dtype(), "x and the experts have different types");
  for (const Stored& matrix : mixture->matrices()) {
    matrix->append_to(in);
  }
  const metal::Number type = number_of("x", x.dtype());
  const uint32_t rows = x.shape(0) == 1 ? 1 : metal::kTileRows;
  MixtureStep step{
      mixture, metal::route_kernel(number_of("logits", logits.dtype())),
      metal::expert_gates_kernel(type, mixture->gate->packing(), rows),
      metal::expert_downs_kernel(type, mixture->down->packing(), rows), metal::mix_kernel(type)};
  return mx::array(
      x.shape(), x.dtype(), device_operation("mixture", std::move(step)), std::move(in));
}

}  // namespace quire::ops
