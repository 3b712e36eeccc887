#pragma once

#include <cstdint>
#include <vector>

#include "ops/ops.h"

namespace quire::ops {

// How long each of `passes` reads of a buffer of `bytes` takes with all threads, in seconds, each
// in the way that was fastest: the bandwidth that decode attention is measured against.
std::vector<double> read_seconds(int64_t bytes, int64_t passes, CpuWorkers& workers);

}  // namespace quire::ops
