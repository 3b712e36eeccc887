#include "ops/rope.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "cpu/head_dims.h"

namespace quire::ops {
namespace {

constexpr size_t kMaxFrequencies = cpu::kMaxHeadDim / 2;

void check_weight(const char* name, const mx::array& weight, int head_dim) {
  if (weight.shape() != mx::Shape{head_dim} || weight.dtype() != mx::float32) {
    throw std::invalid_argument(
        std::string(name) + " must be [" + std::to_string(head_dim) +
        "] float32, one number per dimension");
  }
}

}  // namespace

RopeTable::RopeTable(std::vector<double> its_frequencies, double its_magnitude)
    : frequencies(std::move(its_frequencies)), magnitude(its_magnitude) {
  const bool fits = !frequencies.empty() && frequencies.size() <= kMaxFrequencies;
  if (!fits || !std::ranges::all_of(frequencies, [](double x) { return std::isfinite(x); })) {
    throw std::invalid_argument(
        "frequencies must be numbers, 1 to " + std::to_string(kMaxFrequencies) + " of them");
  }
  if (!(magnitude > 0.0 && std::isfinite(magnitude))) {
    throw std::invalid_argument("magnitude must be a positive number");
  }
}

void RopeTable::check_head_dim(int head_dim) const {
  if (2 * frequencies.size() > static_cast<size_t>(head_dim)) {
    throw std::invalid_argument(
        std::to_string(frequencies.size()) + " frequencies do not turn heads of " +
        std::to_string(head_dim) + " dimensions: there may be one for each two");
  }
}

void check_norms(const std::optional<QKNorms>& norms, int head_dim) {
  if (norms) {
    check_weight("q_weight", norms->query_weight, head_dim);
    check_weight("k_weight", norms->key_weight, head_dim);
  }
}

}  // namespace quire::ops
