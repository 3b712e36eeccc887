#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/checked.h"
#include "metal/arguments.h"
#include "ops/metal/layer_rows.h"
#include "ops/metal/ops.h"

// Products of a few rows with stored matrices, on a GPU.
namespace quire::ops {
namespace {

// Returns the number of rows for which a threadgroup reads a matrix once.
uint32_t tile_rows(uint32_t rows) { return rows <= 2 ? rows : metal::kTileRows; }

struct Products {
  std::vector<Stored> matrices;
  metal::Kernel kernel;
  metal::ProductArguments arguments;
  uint32_t tiles;

  // `in` has x, the residual if there is one, and the matrices' arrays.
  void encode(
      Encoder& encoder, const std::vector<mx::array>& in, std::vector<mx::array>& out) const {
    constexpr int kMatrices = metal::kProductMatrices;
    const mx::array x = encoder.contiguous(in[0]);
    const bool adds = arguments.residual != 0;
    const mx::array residual = adds ? encoder.contiguous(in[1]) : x;
    for (mx::array& each : out) {
      allocate_on_device(each);
    }
    encoder.kernel(kernel);
    encoder.input(x, 0);
    for (int i = 0; i < kMatrices; ++i) {  // the first in the place of those that are not there
      const size_t at = static_cast<size_t>(i) < matrices.size() ? static_cast<size_t>(i) : 0;
      matrices[at]->bind(encoder, 1 + i, 1 + kMatrices + i, 1 + 2 * kMatrices + i);
      matrices[at]->bind_bias(encoder, 1 + 3 * kMatrices + i);
      encoder.output(out[at], 1 + 4 * kMatrices + i);
    }
    encoder.input(residual, 1 + 5 * kMatrices);
    encoder.bytes(arguments, 2 + 5 * kMatrices);
    encoder.run_groups(MTL::Size(tiles_of(arguments.rows, tile_rows(arguments.rows)), tiles, 1));
  }
};

struct GatedProduct {
  Stored gate;
  Stored up;
  metal::Kernel kernel;
  metal::ProductArguments arguments;

  void encode(
      Encoder& encoder, const std::vector<mx::array>& in, std::vector<mx::array>& out) const {
    const mx::array x = encoder.contiguous(in[0]);
    allocate_on_device(out[0]);
    encoder.kernel(kernel);
    encoder.input(x, 0);
    gate->bind(encoder, 1, 2, 3);
    up->bind(encoder, 4, 5, 6);
    encoder.output(out[0], 7);
    encoder.bytes(arguments, 8);
    encoder.run_groups(MTL::Size(
        tiles_of(arguments.rows, tile_rows(arguments.rows)),
        tiles_of(gate->outputs(), metal::kGateOutputs), 1));
  }
};

void check_product(const mx::array& x, const StoredMatrix& matrix) {
  require<std::invalid_argument>(
      x.ndim() == 2 && x.size() > 0 && x.shape(1) == int64_t{matrix.inputs()},
      "x must be [rows, ", matrix.inputs(), "], as the matrix has so many inputs");
  require<std::invalid_argument>(
      !matrix.type() || *matrix.type() == x.dtype(), "x and a matrix have different types");
  require<std::invalid_argument>(matrix.experts() == 1, "a stack of experts is no matrix");
}

metal::ProductArguments arguments_of(const mx::array& x, const StoredMatrix& matrix) {
  metal::ProductArguments arguments{};
  arguments.inputs = matrix.inputs();
  arguments.rows = narrowed<uint32_t>("rows", x.shape(0));
  arguments.group_shift = matrix.group_shift();
  return arguments;
}

std::vector<mx::array> multiply_together(
    const mx::array& x, const std::vector<Stored>& matrices,
    const std::optional<mx::array>& residual) {
  Products work{
      matrices,
      metal::products_kernel(
          number_of("x", x.dtype()), matrices[0]->packing(),
          tile_rows(narrowed<uint32_t>("rows", x.shape(0)))),
      arguments_of(x, *matrices[0]), 0};
  std::vector<mx::array> in{x};
  if (residual) {
    in.push_back(*residual);
    work.arguments.residual = 1;
  }
  std::vector<mx::Shape> shapes;
  work.arguments.matrices = narrowed<uint32_t>("matrices", matrices.size());
  for (size_t i = 0; i < matrices.size(); ++i) {
    const StoredMatrix& matrix = *matrices[i];
    work.arguments.added |= (matrix.has_bias() ? 1u : 0u) << i;
    work.arguments.outputs[i] = matrix.outputs();
    work.arguments.first_tiles[i] = work.tiles;
    work.tiles += tiles_of(matrix.outputs(), metal::kProductOutputs);
    shapes.push_back({x.shape(0), narrowed<int>("outputs", matrix.outputs())});
    matrix.append_to(in);
  }
  const std::vector<mx::Dtype> types(matrices.size(), x.dtype());
  return mx::array::make_arrays(shapes, types, device_operation("multiply", std::move(work)), in);
}

}  // namespace

std::vector<mx::array> device::multiply(
    const mx::array& x, const std::vector<Stored>& matrices,
    const std::optional<mx::array>& residual) {
  std::vector<std::vector<size_t>> commands;  // indices of the matrices that share each of them
  for (size_t i = 0; i < matrices.size(); ++i) {
    check_product(x, *matrices[i]);
    const auto shared = std::ranges::find_if(commands, [&](const auto& others) {
      return others.size() < metal::kProductMatrices &&
             matrices[others[0]]->shares_format(*matrices[i]);
    });
    (shared == commands.end() ? commands.emplace_back() : *shared).push_back(i);
  }
  if (residual) {
    require<std::invalid_argument>(
        matrices.size() == 1, "a residual is added to the product of one matrix");
    check_same_type("x", x, "residual", *residual);
    require<std::invalid_argument>(
        residual->shape() ==
            mx::Shape{x.shape(0), narrowed<int>("outputs", matrices[0]->outputs())},
        "the residual and the product have different shapes");
  }
  std::vector<mx::array> products(matrices.size(), x);
  for (const std::vector<size_t>& command : commands) {
    std::vector<Stored> together;
    for (const size_t i : command) {
      together.push_back(matrices[i]);
    }
    const std::vector<mx::array> made = multiply_together(x, together, residual);
    for (size_t i = 0; i < command.size(); ++i) {
      products[command[i]] = made[i];
    }
  }
  return products;
}

mx::array device::multiply_gated(
    const mx::array& x, const Stored& gate, const Stored& up, const std::string& kind) {
  check_product(x, *gate);
  check_product(x, *up);
  require<std::invalid_argument>(
      gate->outputs() == up->outputs() && gate->shares_format(*up) && !gate->has_bias() &&
          !up->has_bias(),
      "gate and up have different outputs or formats, or biases");
  const metal::Kernel kernel = metal::gated_product_kernel(
      number_of("x", x.dtype()), gate->packing(),
      tile_rows(narrowed<uint32_t>("rows", x.shape(0))));
  GatedProduct work{gate, up, kernel, arguments_of(x, *gate)};
  work.arguments.outputs[0] = gate->outputs();
  work.arguments.gate = number_of_gate(kind);
  std::vector<mx::array> in{x};
  gate->append_to(in);
  up->append_to(in);
  return mx::array(
      {x.shape(0), narrowed<int>("outputs", gate->outputs())}, x.dtype(),
      device_operation("multiply_gated", std::move(work)), std::move(in));
}

}  // namespace quire::ops
