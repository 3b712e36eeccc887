#pragma once

#include "ops/ops.h"

namespace quire::ops {

// From now on MLX's float32 products run on these workers, which must live as long as products may
// be under way. Throws std::logic_error where the library that multiplies was not loaded.
void multiply_on(CpuWorkers& workers);

}  // namespace quire::ops
