#pragma once

#include <cstddef>
#include <vector>

#include "cpu/kernels.h"

// Which experts of a mixture compute which rows.
namespace quire::ops {

// The experts of each row, the best one first, and what their results are multiplied by.
struct Routing {
  size_t chosen;                  // for each row
  std::vector<size_t> experts;  // [rows][chosen]
  std::vector<float> weights;     // [rows][chosen]
};

// logits: [rows][stride], of which the first `experts` are the router's; they become the softmax of
// themselves. normalised: whether a row's weights are divided by their sum. Of experts with equal
// shares the one with the lowest number comes first. A row of NaN has the first experts, and NaN.
Routing route(const cpu::LayerKernels& kernels, float* logits, size_t rows, size_t stride,
              size_t experts, size_t chosen, bool normalised);

// Rows of one expert, or of a part of them: pairs [first, first + count).
struct ExpertRun {
  size_t expert;
  size_t first;
  size_t count;
};

// Pairs of a row and an expert, sorted by experts and then by rows.
struct ExpertRows {
  std::vector<size_t> rows;    // of each pair
  std::vector<size_t> places;  // [rows][chosen]: which pair it is
  std::vector<ExpertRun> runs;   // of at most cpu::kMaxRows pairs
};

ExpertRows by_expert(const Routing& routing, size_t experts);

}  // namespace quire::ops
