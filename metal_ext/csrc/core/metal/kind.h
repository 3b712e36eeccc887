#pragma once

namespace quire::metal {

// How a sequence's rows are found: the kernels' three ways (kernels/metal/arguments.h).
enum class Kind { sparse, paged, dense };

}  // namespace quire::metal
