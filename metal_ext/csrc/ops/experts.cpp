#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "core/checked.h"
#include "ops/checks.h"
#include "ops/layers.h"
#include "ops/packed_linear.h"
#include "ops/primitive.h"

// Computes mixtures of experts, on a CPU.
namespace quire::ops {
namespace {

// The number of rows that are computed together. Each expert is read once for all these rows.
constexpr size_t kRowsAtOnce = 512;
constexpr size_t kTaskRows = 16;
constexpr size_t kNowhere = SIZE_MAX;

constexpr size_t floats_of(size_t bytes) {
  return whole_lines((bytes + sizeof(float) - 1) / sizeof(float));
}

// Calls body(i, worker) for all i below count, on one thread if count * `numbers` floats are few.
template <class Body>
void for_each(ThreadPool& pool, size_t count, size_t numbers, const Body& body) {
  const size_t at_once = std::clamp<size_t>(count / pool.threads(), 1, kTaskRows);
  pool.run_in_groups(count, at_once, body, count * numbers * sizeof(float) >= kParallelBytes);
}

struct Mixture {
  Packed router;
  PackedStack gate_up;
  PackedStack down;
  SharedExpert shared;
  int64_t chosen;
  bool normalised;
  cpu::Gate gate;
};

// The biases of a mixture's linear layers, each null or with the numbers of all experts.
struct BiasPlaces {
  const float* router = nullptr;
  const float* gate_up = nullptr;
  const float* down = nullptr;
};

// The experts chosen for each row, the best one first, and the factors of their results.
struct Routing {
  size_t chosen;                // experts of each row
  std::vector<size_t> experts;  // [rows][chosen]
  std::vector<float> weights;   // [rows][chosen]
};

// The pairs [first, first + count) of a row and an expert. All have the expert `expert`.
struct ExpertRun {
  size_t expert;
  size_t first;
  size_t count;
};

// Pairs of a row and an expert, sorted by expert, then by row.
struct ExpertRows {
  std::vector<size_t> rows;    // the row of each pair
  std::vector<size_t> places;  // [rows][chosen]: index of each pair
  std::vector<ExpertRun> runs;  // of at most cpu::kMaxRows pairs
};

// Writes the indices of the `chosen` largest of n shares to `best`, the largest first. Among equal
// shares, the lower index comes first. NaN counts as the smallest share.
void take_largest(const float* shares, size_t n, size_t chosen, size_t* best) {
  for (size_t i = 0; i < n; ++i) {
    size_t place = std::min(i, chosen);
    while (place > 0 && shares[i] > shares[best[place - 1]]) {
      --place;
    }
    if (place < chosen) {
      const size_t end = std::min(i, chosen - 1);
      std::move_backward(best + place, best + end, best + end + 1);
      best[place] = i;
    }
  }
}

// Chooses each row's experts by a softmax of the first `experts` numbers of logits [rows][stride].
// The softmax overwrites them. If `normalised`, a row's weights are divided by their sum. Among
// equal experts, the lower index comes first. A row of NaN gets NaN weights.
Routing route(const cpu::LayerKernels& kernels, float* logits, size_t rows, size_t stride,
              size_t experts, size_t chosen, bool normalised) {
  Routing found{chosen, std::vector<size_t>(rows * chosen), std::vector<float>(rows * chosen)};
  for (size_t row = 0; row < rows; ++row) {
    float* const shares = logits + row * stride;
    kernels.softmax(shares, experts, shares);
    size_t* const best = found.experts.data() + row * chosen;
    take_largest(shares, experts, chosen, best);
    float sum = 0.0f;
    for (size_t rank = 0; rank < chosen; ++rank) {
      sum += shares[best[rank]];
    }
    for (size_t rank = 0; rank < chosen; ++rank) {
      const float share = shares[best[rank]];
      found.weights[row * chosen + rank] = normalised ? share / sum : share;
    }
  }
  return found;
}

// Sorts the pairs (row, expert) by their experts (counting sort).
ExpertRows by_expert(const Routing& routing, size_t experts) {
  const size_t pairs = routing.experts.size();
  std::vector<size_t> next(experts + 1);  // index of each expert's next pair
  for (const size_t expert : routing.experts) {
    ++next[expert + 1];
  }
  ExpertRows sorted{std::vector<size_t>(pairs), std::vector<size_t>(pairs), {}};
  for (size_t expert = 0; expert < experts; ++expert) {
    const size_t count = next[expert + 1];
    for (size_t done = 0; done < count; done += cpu::kMaxRows) {
      sorted.runs.push_back({expert, next[expert] + done, std::min(count - done, cpu::kMaxRows)});
    }
    next[expert + 1] += next[expert];
  }
  for (size_t pair = 0; pair < pairs; ++pair) {
    const size_t place = next[routing.experts[pair]]++;
    sorted.rows[place] = pair / routing.chosen;
    sorted.places[pair] = place;
  }
  return sorted;
}

// Rows that one expert computes together. The fields named _at are offsets in floats.
struct Run {
  const PackedLayers* gate_up;
  const PackedLayers* down;
  size_t expert;
  size_t rows;
  size_t first;     // index of the first result
  size_t x_at;      // prepared input of gate and up, which runs may share
  size_t both_at;   // output of gate and up
  size_t gated_at;  // prepared input of down

  size_t inner() const { return down->shape().inputs; }
};

struct RowOfRun {
  size_t run;
  size_t number;
  size_t x;  // the row of x
};

// Computes a mixture of experts for some rows, sorted by expert, so that each expert's weights are
// read once. Each pair of a row and an expert has a result. Results of the shared expert follow.
//   x -> norm (in `out` until the sum) -> router -> runs of rows
//   run: prepare -> gate and up -> SiLU(gate) * up, prepared -> down -> results
//   out = x + the sum of weight * result
class MixtureStep {
 public:
  MixtureStep(const Mixture& mixture, const BiasPlaces& biases, CpuWorkers& workers, size_t rows,
              const float* x, float* out)
      : mixture_(mixture),
        biases_(biases),
        workers_(workers),
        layer_(workers.kernels.layer),
        linear_(workers.kernels.linear),
        hidden_(mixture.down->shape().outputs),
        rows_(rows),
        x_(x),
        out_(out) {}

  void run(const float* norm, float eps) {
    for_each(workers_.pool, rows_, hidden_, [&](size_t row, size_t) {
      layer_.rms_norm(x_ + row * hidden_, norm, eps, hidden_, out_ + row * hidden_);
    });
    choose();
    lay_out();
    take_memory();
    prepare();
    multiply_all(gate_up_, workers_);
    gate();
    multiply_all(down_, workers_);
    sum();
  }

 private:
  void choose() {
    const PackedLinear& router = *mixture_.router;
    const size_t outputs = router.shape().outputs;
    const size_t experts = mixture_.down->count();
    const size_t all = whole_lines(rows_ * outputs);
    float* const logits = workers_.pool.scratch(
        all + multiply_scratch(router, std::min(rows_, cpu::kMaxRows), workers_));
    for_each_rows(rows_, [&](size_t first, size_t count) {
      const auto make_row = [&](size_t row, float* target) {
        std::memcpy(target, out_ + (first + row) * hidden_, hidden_ * sizeof(float));
      };
      multiply(router, count, make_row, logits + all, nullptr, logits + first * outputs, workers_);
    });
    for (size_t row = 0; biases_.router != nullptr && row < rows_; ++row) {
      layer_.add(biases_.router, outputs, logits + row * outputs);
    }
    for (size_t row = 0; mixture_.shared && row < rows_; ++row) {
      gates_.push_back(1.0f / (1.0f + std::exp(-logits[row * outputs + experts])));
    }
    routing_ = route(layer_, logits, rows_, outputs, experts, static_cast<size_t>(mixture_.chosen),
                     mixture_.normalised);
    pairs_ = by_expert(routing_, experts);
  }

  void lay_out() {
    std::vector<size_t> alone(rows_, kNowhere);  // x_at of rows that are a run's only row
    for (const ExpertRun& its : pairs_.runs) {
      const size_t* const x = pairs_.rows.data() + its.first;
      size_t* const kept = its.count == 1 ? &alone[*x] : nullptr;
      add_run({mixture_.gate_up.get(), mixture_.down.get(), its.expert, its.count, its.first, 0, 0,
               0}, [&](size_t i) { return x[i]; }, kept);
    }
    results_ = pairs_.rows.size();
    if (mixture_.shared) {
      const auto& [gate_up, down] = *mixture_.shared;
      for_each_rows(rows_, [&](size_t first, size_t count) {
        add_run({gate_up.get(), down.get(), 0, count, results_ + first, 0, 0, 0},
                [&](size_t i) { return first + i; }, nullptr);
      });
      results_ += rows_;
    }
  }

  // row_of(i) is the row of x for row i of the run. Runs with the same `kept` prepare x only once.
  template <class RowOf>
  void add_run(Run run, const RowOf& row_of, size_t* kept) {
    const bool prepared = kept != nullptr && *kept != kNowhere;
    run.x_at = prepared ? *kept : x_floats_;
    run.both_at = both_floats_;
    run.gated_at = gated_floats_;
    for (size_t i = 0; i < run.rows; ++i) {
      const RowOfRun row{runs_.size(), i, row_of(i)};
      gated_rows_.push_back(row);
      if (!prepared) {
        x_rows_.push_back(row);
      }
    }
    if (!prepared) {
      x_floats_ += floats_of(linear_.prepared_bytes(run.gate_up->shape(), run.rows));
    }
    both_floats_ += whole_lines(run.rows * 2 * run.inner());
    gated_floats_ += floats_of(linear_.prepared_bytes(run.down->shape(), run.rows));
    inner_floats_ = std::max(inner_floats_, whole_lines(run.inner()));
    if (kept != nullptr) {
      *kept = run.x_at;
    }
    runs_.push_back(run);
  }

  // The prepared inputs of gate and up share memory with the results, which are written later.
  void take_memory() {
    const size_t shared = std::max(x_floats_, whole_lines(results_ * hidden_));
    const size_t threads = workers_.pool.threads();
    x_prepared_ = workers_.pool.scratch(
        shared + both_floats_ + gated_floats_ + threads * inner_floats_);
    both_ = x_prepared_ + shared;
    gated_ = both_ + both_floats_;
    made_ = gated_ + gated_floats_;
    for (const Run& its : runs_) {
      gate_up_.push_back({&its.gate_up->shape(), its.gate_up->data(its.expert),
                          bytes_at(x_prepared_ + its.x_at), its.rows, both_ + its.both_at});
      down_.push_back({&its.down->shape(), its.down->data(its.expert),
                       bytes_at(gated_ + its.gated_at), its.rows,
                       x_prepared_ + its.first * hidden_});
    }
  }

  void prepare() {
    for_each(workers_.pool, x_rows_.size(), hidden_, [&](size_t i, size_t) {
      const RowOfRun& row = x_rows_[i];
      const Run& its = runs_[row.run];
      linear_.prepare(its.gate_up->shape(), out_ + row.x * hidden_, row.number,
                      bytes_at(x_prepared_ + its.x_at));
    });
  }

  void gate() {
    for_each(workers_.pool, gated_rows_.size(), 2 * inner_floats_, [&](size_t i, size_t worker) {
      const RowOfRun& row = gated_rows_[i];
      const Run& its = runs_[row.run];
      float* const gates = both_ + its.both_at + row.number * 2 * its.inner();
      float* const made = made_ + worker * inner_floats_;
      if (biases_.gate_up != nullptr) {
        layer_.add(biases_.gate_up + its.expert * 2 * its.inner(), 2 * its.inner(), gates);
      }
      layer_.gate(mixture_.gate, gates, gates + its.inner(), its.inner(), made);
      linear_.prepare(its.down->shape(), made, row.number, bytes_at(gated_ + its.gated_at));
    });
  }

  void sum() {
    const size_t chosen = routing_.chosen;
    for_each(workers_.pool, rows_, (chosen + 2) * hidden_, [&](size_t row, size_t) {
      float* const to = out_ + row * hidden_;
      std::fill_n(to, hidden_, 0.0f);
      for (size_t pair = row * chosen; pair < (row + 1) * chosen; ++pair) {
        const float weight = routing_.weights[pair];
        layer_.add_scaled(result(pairs_.places[pair]), weight, hidden_, to);
        if (biases_.down != nullptr) {
          layer_.add_scaled(biases_.down + routing_.experts[pair] * hidden_, weight, hidden_, to);
        }
      }
      if (mixture_.shared) {
        layer_.add_scaled(result(pairs_.rows.size() + row), gates_[row], hidden_, to);
      }
      layer_.add(x_ + row * hidden_, hidden_, to);
    });
  }

  const float* result(size_t number) const { return x_prepared_ + number * hidden_; }
  static std::byte* bytes_at(float* place) { return reinterpret_cast<std::byte*>(place); }

  const Mixture& mixture_;
  const BiasPlaces biases_;
  CpuWorkers& workers_;
  const cpu::LayerKernels& layer_;
  const cpu::LinearKernels& linear_;
  const size_t hidden_;
  const size_t rows_;
  const float* const x_;
  float* const out_;

  Routing routing_;
  ExpertRows pairs_;
  std::vector<float> gates_;  // the shared expert's factor for each row
  std::vector<Run> runs_;
  std::vector<RowOfRun> x_rows_;      // rows that gate and up take
  std::vector<RowOfRun> gated_rows_;  // rows that down takes
  std::vector<Product> gate_up_;      // products of all runs
  std::vector<Product> down_;
  size_t results_ = 0;
  size_t x_floats_ = 0;
  size_t both_floats_ = 0;
  size_t gated_floats_ = 0;
  size_t inner_floats_ = 0;  // width of the widest expert
  float* x_prepared_ = nullptr;
  float* both_ = nullptr;
  float* gated_ = nullptr;
  float* made_ = nullptr;  // [threads][inner_floats_]
};

struct MixtureMlp {
  static constexpr Results kResults = Results::rows;
  std::shared_ptr<const Mixture> mixture;
  float eps;
  Workers workers;

  void run(const Arrays& in, Arrays& out) const {
    const auto rows = static_cast<size_t>(out[0].shape(0));
    const auto hidden = static_cast<size_t>(out[0].shape(1));
    const auto held = workers->pool.hold();
    BiasPlaces biases;
    if (in.size() > 2) {
      biases = {in.floats(2), in.floats(3), in.floats(4)};
    }
    for (size_t first = 0; first < rows; first += kRowsAtOnce) {
      MixtureStep step(*mixture, biases, *workers, std::min(rows - first, kRowsAtOnce),
                       in.floats(0) + first * hidden, out.floats(0) + first * hidden);
      step.run(in.floats(1), eps);
    }
  }
};

void check_expert(const cpu::LinearShape& gate_up, const cpu::LinearShape& down, size_t hidden) {
  if (gate_up.inputs != hidden || gate_up.outputs != 2 * down.inputs || down.outputs != hidden) {
    throw std::invalid_argument("an expert's gate, up and down do not fit each other");
  }
}

void check_mixture(const Mixture& its, size_t hidden) {
  const size_t experts = its.gate_up->count();
  const cpu::LinearShape& router = its.router->shape();
  if (its.down->count() != experts || router.inputs != hidden ||
      router.outputs != experts + (its.shared ? 1 : 0)) {
    throw std::invalid_argument("router and experts do not fit each other");
  }
  check_expert(its.gate_up->shape(), its.down->shape(), hidden);
  if (its.shared) {
    check_expert(its.shared->first->shape(), its.shared->second->shape(), hidden);
  }
  checked_between("chosen", its.chosen, 1, static_cast<int64_t>(experts));
}

// Checks the biases, if there are any, and adds them to the operation's inputs.
void add_biases(std::vector<mx::array>& in, const Mixture& its, const MixtureBiases& biases) {
  if (!biases) {
    return;
  }
  if (its.shared) {
    throw std::invalid_argument("a mixture with a shared expert has no biases");
  }
  const int experts = narrowed<int>("experts", its.down->count());
  const auto add = [&](const char* name, const mx::array& bias, const mx::Shape& shape) {
    check_float32(name, bias, shape);
    in.push_back(row_by_row(bias));
  };
  add("the router's bias", std::get<0>(*biases), {experts});
  add("the bias of gate and up", std::get<1>(*biases),
      {experts, narrowed<int>("outputs", its.gate_up->shape().outputs)});
  add("the bias of down", std::get<2>(*biases),
      {experts, narrowed<int>("outputs", its.down->shape().outputs)});
}

}  // namespace

mx::array mixture_mlp(
    const mx::array& x, const mx::array& norm, double eps, const Packed& router,
    const PackedStack& gate_up, const PackedStack& down, int64_t chosen, bool normalised,
    const SharedExpert& shared, const Workers& workers, const std::string& gate,
    const MixtureBiases& biases) {
  const auto mixture = std::make_shared<const Mixture>(
      Mixture{router, gate_up, down, shared, chosen, normalised, cpu::gate_of(gate)});
  const size_t hidden = down->shape().outputs;
  check_mixture(*mixture, hidden);
  check_floats("x", x, hidden);
  check_norm(norm, hidden);
  std::vector<mx::array> in{row_by_row(x), row_by_row(norm)};
  add_biases(in, *mixture, biases);
  return mx::array({x.shape(0), narrowed<int>("inputs", hidden)}, mx::float32,
                   operation("mixture_mlp",
                             MixtureMlp{mixture, static_cast<float>(eps), workers}),
                   std::move(in));
}

}  // namespace quire::ops
