#include "ops/packed_linear.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "core/checked.h"
#include "core/posix_memory.h"
#include "cpu/packing.h"
#include "mlx/ops.h"
#include "ops/primitive.h"

// Packs weights of linear layers, and multiplies rows by packed weights.
namespace quire::ops {

namespace {

// The most bytes that a packed layer may have. An address range may have as many (core/geometry.h).
constexpr size_t kMaxPackedBytes = size_t{1} << 46;

// Throws std::invalid_argument with the joined parts unless `packs`.
template <class... Parts>
void require_that(bool packs, const Parts&... parts) {
  require<std::invalid_argument>(packs, "a linear layer cannot be packed: ", parts...);
}

cpu::StoredNumber number_of(mx::Dtype dtype) {
  require_that(dtype == mx::bfloat16 || dtype == mx::float32 || dtype == mx::float16,
               "its numbers are neither float32 nor bfloat16 nor float16");
  return dtype == mx::bfloat16 ? cpu::StoredNumber::bfloat16 : cpu::StoredNumber::float32;
}

cpu::StoredKind kind_of(size_t inputs, const MatrixKind& its) {
  const size_t outputs = checked_between("outputs", its.outputs, 1, INT32_MAX);
  if (its.bits == 0) {
    return {outputs, number_of(its.numbers)};
  }
  require_that(its.bits >= 1 && its.bits <= 8 && its.bits != 7,
               "a code has 1 to 6 or 8 bits, not ", its.bits);
  require_that(its.group == 32 || its.group == 64 || its.group == 128,
               "a group has 32, 64 or 128 inputs, not ", its.group);
  const bool floats = its.numbers == mx::uint8;
  require_that(!floats || (its.bits == 4 && its.group == 32),
               "floats of 4 bits stand in groups of 32");
  const auto group = static_cast<size_t>(its.group);
  require_that(inputs % group == 0, "its inputs are no whole groups");
  return {outputs, floats ? cpu::StoredNumber::exponents : number_of(its.numbers),
          static_cast<size_t>(its.bits), group};
}

size_t inputs_of(const mx::array& weight, const std::optional<CodeGroups>& codes) {
  require_that(weight.ndim() == 2 && weight.size() > 0, "a weight is not [outputs, inputs]");
  const auto columns = static_cast<size_t>(weight.shape(1));
  if (!codes || codes->bits < 1) {
    return columns;
  }
  require_that(weight.dtype() == mx::uint32, "codes are uint32 words");
  return columns * 32 / static_cast<size_t>(codes->bits);
}

cpu::StoredKind checked_kind(
    const mx::array& weight, const std::optional<CodeGroups>& codes, size_t inputs) {
  require_that(inputs_of(weight, codes) == inputs, "its parts differ in inputs");
  if (!codes) {
    return kind_of(inputs, {weight.shape(0), weight.dtype(), 0, 0});
  }
  require_that(codes->bits != 0, "a code has 1 to 6 or 8 bits, not 0");
  const mx::array& scales = codes->scales;
  const cpu::StoredKind kind =
      kind_of(inputs, {weight.shape(0), scales.dtype(), codes->bits, codes->group});
  const mx::Shape expected{weight.shape(0), narrowed<int>("groups", inputs / kind.group)};
  const bool floats = kind.numbers == cpu::StoredNumber::exponents;
  const std::optional<mx::array>& biases = codes->biases;
  require_that(
      scales.shape() == expected && biases.has_value() != floats &&
          (!biases || (biases->shape() == expected && biases->dtype() == scales.dtype())),
      "its scales and biases do not fit its codes");
  return kind;
}

cpu::LinearShape checked_shape(
    size_t inputs, const std::vector<cpu::StoredKind>& kinds, size_t count = 1) {
  const cpu::LinearShape shape = cpu::joined_shape(inputs, kinds);
  narrowed<int>("outputs", shape.outputs);
  narrowed<int>("inputs", inputs);
  require_that(shape.panels() <= kMaxPackedBytes / shape.panel_bytes() / count,
               "it has more than 2^46 bytes");
  return shape;
}

// Returns x as a contiguous array for packing. float16 becomes float32.
mx::array readable(const mx::array& x) {
  mx::array plain = mx::contiguous(x.dtype() == mx::float16 ? mx::astype(x, mx::float32) : x);
  plain.eval();
  return plain;
}

std::optional<CodeGroups> groups_of(const Codes& codes, size_t i) {
  return codes.empty() ? std::nullopt : codes[i];
}

// Returns the number of inputs, and the stored form of each weight.
std::pair<size_t, std::vector<cpu::StoredKind>> checked_kinds(
    const std::vector<mx::array>& weights, const Codes& codes) {
  require_that(!weights.empty(), "it has no weights");
  require_that(codes.empty() || codes.size() == weights.size(),
               "there are codes for every weight, or for none");
  const size_t inputs = inputs_of(weights[0], groups_of(codes, 0));
  std::vector<cpu::StoredKind> kinds;
  for (size_t i = 0; i < weights.size(); ++i) {
    kinds.push_back(checked_kind(weights[i], groups_of(codes, i), inputs));
  }
  return {inputs, std::move(kinds)};
}

// Returns a stack [experts, outputs, inputs] as one matrix.
mx::array below_each_other(const mx::array& x, int experts) {
  require_that(x.ndim() == 3 && x.shape(0) == experts && experts > 0,
               "its parts are not [experts, outputs, inputs], of as many experts each");
  narrowed<int>("outputs of all experts", int64_t{x.shape(0)} * x.shape(1));
  return mx::flatten(x, 0, 1);
}

// Packs weights that were checked. Each array has the rows of all layers, one layer after the
// other. `kinds` has the stored form of each array's part for one layer.
void pack(PackedLayers& packed, const std::vector<cpu::StoredKind>& kinds,
          const std::vector<mx::array>& weights, const Codes& codes, const Workers& workers) {
  const size_t layers = packed.count();
  std::vector<mx::array> read;  // keeps the arrays that `parts` points into
  std::vector<std::vector<cpu::Weights>> parts(layers);
  const auto point = [&](const mx::array& x, const void* cpu::Weights::*to) {
    read.push_back(readable(x));
    const std::byte* const start = read.back().data<std::byte>();
    for (size_t layer = 0; layer < layers; ++layer) {
      parts[layer].back().*to = start + layer * (read.back().nbytes() / layers);
    }
  };
  for (size_t i = 0; i < weights.size(); ++i) {
    for (auto& its : parts) {
      its.push_back({kinds[i], nullptr});
    }
    point(weights[i], &cpu::Weights::numbers);
    if (const auto its = groups_of(codes, i)) {
      point(its->scales, &cpu::Weights::scales);
      if (its->biases) {
        point(*its->biases, &cpu::Weights::biases);
      }
    }
  }
  const size_t panels = packed.shape().panels();
  const auto held = workers->pool.hold();
  workers->pool.run(layers * panels, [&](size_t task, size_t) {
    const size_t layer = task / panels;
    cpu::pack(packed.shape(), parts[layer], task % panels, 1, packed.data(layer));
  });
}

}  // namespace

PackedLayers::PackedLayers(const cpu::LinearShape& shape, size_t count)
    : shape_(shape), count_(count), bytes_(cpu::rounded_up(packed_bytes(), system_page_bytes())) {
  void* const memory =
      mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw std::system_error(
        errno, std::generic_category(), message("mmap of ", bytes_, " bytes for weights"));
  }
#ifdef __linux__
  madvise(memory, bytes_, MADV_HUGEPAGE);  // may fail: small pages are only a little slower
#endif
  data_ = static_cast<std::byte*>(memory);
}

PackedLayers::~PackedLayers() { munmap(data_, bytes_); }

size_t packed_bytes(int64_t inputs, const std::vector<MatrixKind>& matrices) {
  require_that(!matrices.empty(), "it has no weights");
  const size_t count = checked_between("inputs", inputs, 1, INT32_MAX);
  std::vector<cpu::StoredKind> kinds;
  for (const MatrixKind& its : matrices) {
    kinds.push_back(kind_of(count, its));
  }
  return checked_shape(count, kinds).packed_bytes();
}

std::shared_ptr<PackedLinear> pack_linear(
    const std::vector<mx::array>& weights, const Codes& codes, const Workers& workers, bool exact) {
  const auto [inputs, kinds] = checked_kinds(weights, codes);
  cpu::LinearShape shape = checked_shape(inputs, kinds);
  shape.activations = exact ? cpu::Activations::float32 : workers->activations;
  auto packed = std::make_shared<PackedLinear>(shape);
  pack(*packed, kinds, weights, codes, workers);
  return packed;
}

std::shared_ptr<PackedExperts> pack_experts(
    const std::vector<mx::array>& weights, const Codes& codes, const Workers& workers) {
  require_that(!weights.empty(), "it has no weights");
  const int experts = weights[0].ndim() == 3 ? weights[0].shape(0) : 0;
  const auto flat = [&](const mx::array& x) { return below_each_other(x, experts); };
  std::vector<mx::array> rows;
  for (const mx::array& its : weights) {
    rows.push_back(flat(its));
  }
  Codes groups;
  for (const auto& its : codes) {
    groups.emplace_back();
    if (its) {
      const auto biases = its->biases ? std::optional(flat(*its->biases)) : std::nullopt;
      groups.back() = {flat(its->scales), biases, its->bits, its->group};
    }
  }
  auto [inputs, kinds] = checked_kinds(rows, groups);
  for (cpu::StoredKind& its : kinds) {
    its.outputs /= static_cast<size_t>(experts);
  }
  const auto count = static_cast<size_t>(experts);
  cpu::LinearShape shape = checked_shape(inputs, kinds, count);
  shape.activations = workers->activations;
  auto packed = std::make_shared<PackedExperts>(shape, count);
  pack(*packed, kinds, rows, groups, workers);
  return packed;
}

namespace {

// A task for many rows has at most this many bytes of weights, which fit in a core's cache.
constexpr size_t kTaskBytes = size_t{256} << 10;
// If a product has at most this many rows, a task's weights need not stay in the cache.
constexpr size_t kFewRows = 16;
constexpr size_t kPreparedRows = 16;

// The scratch memory of a call: one row of x for each thread, and all rows in prepared form.
struct Scratch {
  size_t row_floats;
  float* rows;  // [threads][row_floats]
  std::byte* prepared;

  Scratch(const PackedLinear& packed, const CpuWorkers& workers, float* memory)
      : row_floats(whole_lines(packed.shape().inputs)),
        rows(memory),
        prepared(reinterpret_cast<std::byte*>(memory + workers.pool.threads() * row_floats)) {}
};

// Panels (groups of outputs) of a product that one thread multiplies as one task.
struct Task {
  size_t product;
  size_t first;
  size_t panels;
};

// Divides the panels (groups of outputs) of all products into tasks. A task takes one thread's
// share of half of the remaining panels (guided self-scheduling, Polychronopoulos and Kuck, 1987).
// So memory is first read in long stretches, and threads end at about the same time.
std::vector<Task> tasks_of(std::span<const Product> products, size_t threads) {
  const auto cost = [](const Product& its) { return its.rows * its.shape->panel_bytes(); };
  size_t left = 0;
  for (const Product& its : products) {
    left += its.shape->panels() * cost(its);
  }
  std::vector<Task> tasks;
  for (size_t number = 0; number < products.size(); ++number) {
    const Product& its = products[number];
    const size_t all = its.shape->panels();
    const size_t most = its.rows <= kFewRows ? all : kTaskBytes / its.shape->panel_bytes();
    for (size_t done = 0; done < all;) {
      const size_t fair = std::min(most, left / cost(its) / (2 * threads));
      const size_t wanted = std::max(fair / cpu::kMostPanels, size_t{1}) * cpu::kMostPanels;
      const size_t panels = std::min(wanted, all - done);
      tasks.push_back({number, done, panels});
      done += panels;
      left -= panels * cost(its);
    }
  }
  return tasks;
}

}  // namespace

size_t multiply_scratch(const PackedLinear& packed, size_t rows, const CpuWorkers& workers) {
  const Scratch scratch(packed, workers, nullptr);
  const size_t bytes = workers.kernels.linear.prepared_bytes(packed.shape(), rows);
  return workers.pool.threads() * scratch.row_floats + (bytes + sizeof(float) - 1) / sizeof(float);
}

void multiply(
    const PackedLinear& packed, size_t rows, const MakeRow& make_row, float* memory,
    const float* residual, float* out, CpuWorkers& workers) {
  const cpu::LinearShape& shape = packed.shape();
  const cpu::LinearKernels& kernels = workers.kernels.linear;
  ThreadPool& pool = workers.pool;
  const Scratch scratch(packed, workers, memory);

  const size_t rows_at_once = std::clamp<size_t>(rows / pool.threads(), 1, kPreparedRows);
  const auto prepare = [&](size_t row, size_t worker) {
    float* const target = scratch.rows + worker * scratch.row_floats;
    make_row(row, target);
    kernels.prepare(shape, target, row, scratch.prepared);
  };
  const bool many = kernels.prepared_bytes(shape, rows) >= kParallelBytes;
  pool.run_in_groups(rows, rows_at_once, prepare, many);

  const Product product{&shape, packed.data(), scratch.prepared, rows, out, residual};
  multiply_all({&product, 1}, workers);
}

void multiply_all(std::span<const Product> products, CpuWorkers& workers) {
  const std::vector<Task> tasks = tasks_of(products, workers.pool.threads());
  const auto multiply = [&](size_t number, size_t) {
    const Task& task = tasks[number];
    const Product& its = products[task.product];
    const cpu::LinearShape& shape = *its.shape;
    workers.kernels.linear.multiply(shape, its.packed, its.prepared, its.rows, task.first,
                                    task.panels, its.out, shape.outputs);
    if (its.residual != nullptr) {
      const size_t from = task.first * cpu::kPanelOutputs;
      const size_t count = std::min(task.panels * cpu::kPanelOutputs, shape.outputs - from);
      for (size_t row = 0; row < its.rows; ++row) {
        const size_t at = row * shape.outputs + from;
        workers.kernels.layer.add(its.residual + at, count, its.out + at);
      }
    }
  };
  size_t bytes = 0;
  for (const Product& its : products) {
    bytes += its.rows * its.shape->packed_bytes();
  }
  workers.pool.run(tasks.size(), multiply, bytes >= kParallelBytes);
}

}  // namespace quire::ops
