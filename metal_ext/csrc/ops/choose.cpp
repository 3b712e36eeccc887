#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "cpu/filter.h"
#include "ops/checks.h"
#include "ops/layers.h"
#include "ops/primitive.h"

// Chooses tokens from logits, on a CPU.
namespace quire::ops {
namespace {

// The numbers in a piece of a row. Results of pieces are joined in order, so that the bits of a
// row's result do not depend on the number of threads.
constexpr size_t kPieceNumbers = 8192;
constexpr int kChoiceNumbers = 4;

struct Choice {
  float temperature;  // 0 takes the largest logit
  float top_k;        // 0 to keep all tokens
  float top_p;
  float min_p;
};

struct Row {
  const float* raw;
  const float* adjusted;
  Choice choice;
  const uint32_t* key;
  const float* noise;  // as in cpu::Scoring
};

struct Piece {
  double sum;
  cpu::Leader leader;
  float largest;
  bool finite;
};

// Chooses tokens for rows of one length, one row after the other.
class RowChooser {
 public:
  // If `shares_pieces` is true, all threads read pieces of a row; else only the calling thread.
  RowChooser(CpuWorkers& workers, size_t n, float* memory, bool shares_pieces)
      : kernels_(workers.kernels.choose), pool_(workers.pool), n_(n),
        shares_pieces_(shares_pieces), weights_(memory),
        scratch_(memory + whole_lines(n)),
        pieces_(reinterpret_cast<Piece*>(memory + 2 * whole_lines(n))) {}

  static size_t count(size_t n) { return (n + kPieceNumbers - 1) / kPieceNumbers; }
  static size_t scratch(size_t n) {
    return 2 * whole_lines(n) +
           whole_lines(count(n) * sizeof(Piece) / sizeof(float));
  }

  // Returns the token's id, and true if all of the row's numbers are finite.
  std::pair<int32_t, bool> choose(const Row& row) {
    for_each_piece([&](Piece& piece, size_t at, size_t length) {
      piece.largest = kernels_.largest(row.adjusted + at, length, &piece.finite);
      if (row.raw != row.adjusted) {
        kernels_.largest(row.raw + at, length, &piece.finite);
      }
    });
    Piece* const end = pieces_ + count(n_);
    if (!std::all_of(pieces_, end, [](const Piece& piece) { return piece.finite; })) {
      return {0, false};
    }
    const Piece* const best = std::ranges::max_element(pieces_, end, {}, &Piece::largest);
    if (row.choice.temperature > 0.0f && std::isfinite(best->largest)) {
      return {as_id(draw(row, best->largest)), true};
    }
    const float* const from = row.adjusted + (best - pieces_) * kPieceNumbers;
    const float* const first = std::find(from, row.adjusted + n_, best->largest);
    return {first == row.adjusted + n_ ? 0 : as_id(first - row.adjusted), true};
  }

 private:
  static int32_t as_id(size_t place) { return narrowed<int32_t>("id", place); }

  template <class Body>
  void for_each_piece(const Body& body) {
    const auto run = [&](size_t i, size_t) {
      const size_t at = i * kPieceNumbers;
      body(pieces_[i], at, std::min(kPieceNumbers, n_ - at));
    };
    pool_.run(count(n_), run, shares_pieces_);
  }

  double total() const {
    double sum = 0.0;
    for (size_t i = 0; i < count(n_); ++i) {
      sum += pieces_[i].sum;
    }
    return sum;
  }

  // Draws the first token with the largest score. A weight is a probability divided by the largest.
  size_t draw(const Row& row, float largest) {
    const float scale = std::min(1.0f / row.choice.temperature, std::numeric_limits<float>::max());
    for_each_piece([&](Piece& piece, size_t at, size_t length) {
      piece.sum = kernels_.weigh(row.adjusted + at, largest, scale, length, weights_ + at);
    });
    const cpu::Scoring scoring{
        largest, scale, filter(row.choice), {row.key[0], row.key[1]}, row.noise};
    for_each_piece([&](Piece& piece, size_t at, size_t length) {
      const auto first = narrowed<uint32_t>("id", at);
      piece.leader = kernels_.lead(scoring, row.adjusted + at, weights_ + at, length, first);
    });
    const auto score = [](const Piece& piece) { return piece.leader.score; };
    return std::ranges::max_element(pieces_, pieces_ + count(n_), {}, score)->leader.token;
  }

  float filter(const Choice& choice) const {
    const bool some = choice.top_k >= 1.0f && choice.top_k < static_cast<float>(n_);
    if (!some && choice.top_p >= 1.0f) {
      return choice.min_p;
    }
    const cpu::Filter filter{some ? static_cast<size_t>(choice.top_k) : n_, choice.top_p};
    return std::max(choice.min_p, cpu::filter_floor(kernels_, filter, weights_, n_, total(),
                                                    scratch_));
  }

  const cpu::ChooseKernels& kernels_;
  ThreadPool& pool_;
  size_t n_;
  bool shares_pieces_;
  float* weights_;
  float* scratch_;
  Piece* pieces_;
};

// Calls body(chooser, row) for every row. If there are fewer rows than threads, all threads share
// the pieces of one row, then those of the next.
template <class Body>
void for_each_row(size_t rows, size_t n, CpuWorkers& workers, const Body& body) {
  ThreadPool& pool = workers.pool;
  const auto held = pool.hold();
  const size_t floats = RowChooser::scratch(n);
  const bool worth = rows * n * sizeof(float) >= kParallelBytes;
  if (worth && rows >= pool.threads()) {
    float* const scratch = pool.scratch(pool.threads() * floats);
    pool.run(rows, [&](size_t row, size_t worker) {
      RowChooser chooser(workers, n, scratch + worker * floats, false);
      body(chooser, row);
    });
    return;
  }
  RowChooser chooser(workers, n, pool.scratch(floats), worth);
  for (size_t row = 0; row < rows; ++row) {
    body(chooser, row);
  }
}

struct ChooseTokens {
  static constexpr Results kResults = Results::plain;
  Workers workers;

  // `in`: raw logits, choices, keys, noise, adjusted logits (if any). `out`: ids, who is finite.
  void run(const Arrays& in, Arrays& out) const {
    const auto n = static_cast<size_t>(in[0].shape(1));
    const float* const adjusted = in.floats(in.size() == 5 ? 4 : 0);
    for_each_row(out[0].size(), n, *workers, [&](RowChooser& chooser, size_t i) {
      const float* const choice = in.floats(1) + i * kChoiceNumbers;
      const auto [id, finite] =
          chooser.choose({in.floats(0) + i * n, adjusted + i * n,
                          {choice[0], choice[1], choice[2], choice[3]},
                          in[2].data<uint32_t>() + 2 * i, in.floats(3)});
      out[0].data<int32_t>()[i] = id;
      out[1].data<bool>()[i] = finite;
    });
  }
};

}  // namespace

std::pair<mx::array, mx::array> choose_tokens(
    const mx::array& raw, const mx::array& adjusted, const mx::array& choices,
    const mx::array& noise_keys, const mx::array& noise, const Workers& workers) {
  require<std::invalid_argument>(
      raw.dtype() == mx::float32 && raw.ndim() == 2 && raw.size() > 0,
      "raw must be float32 [rows, vocabulary]");
  check_float32("adjusted", adjusted, raw.shape());
  check_float32("choices", choices, {raw.shape(0), kChoiceNumbers});
  require<std::invalid_argument>(
      noise_keys.dtype() == mx::uint32 && noise_keys.shape() == mx::Shape{raw.shape(0), 2},
      "noise_keys must be uint32 [rows, 2]");
  check_float32("noise", noise, {2, cpu::kNoiseNumbers});
  std::vector<mx::array> in{
      row_by_row(raw), row_by_row(choices), row_by_row(noise_keys), row_by_row(noise)};
  if (adjusted.id() != raw.id()) {
    in.push_back(row_by_row(adjusted));
  }
  const mx::Shape rows{raw.shape(0)};
  const auto results = mx::array::make_arrays(
      {rows, rows}, {mx::int32, mx::bool_}, operation("choose_tokens", ChooseTokens{workers}), in);
  return {results[0], results[1]};
}

}  // namespace quire::ops
