// MLX declares this function in a header, and keeps it out of its library.
#include "mlx/backend/metal/allocator.h"

extern "C" __attribute__((used)) void* planted_fault() {
  return &mlx::core::metal::allocator();
}
