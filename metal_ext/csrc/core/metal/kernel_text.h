#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "metal/arguments.h"

// The kernels of kernels/metal: their names, and the source texts that are compiled at run time.
namespace quire::metal {

// The three kinds of GPU memory, in which kernels find rows in different ways.
enum class Kind { sparse, paged, dense };
const char* name_of(Kind kind);

enum class Number { float32, float16, bfloat16 };

// The number of threads in a threadgroup, for kernels that copy or fill bytes.
inline constexpr size_t kCopyThreads = 256;

struct Kernel {
  std::string name;        // in the compiled library, e.g. "append_half_bfloat_paged"
  std::string file;        // a file of kernels/metal
  size_t threads;          // the most threads of a threadgroup
  std::string expression;  // the instance of the template, or empty
};

// `activations` is the type of queries, new keys, new values and results. `kv` is the type of the
// stored K and V. Throws std::logic_error unless head_dim is 64, 128 or 256.
Kernel append_kernel(Number activations, Number kv, Kind kind);
// `group` is the number of query heads that share a KV head.
Kernel decode_split_kernel(
    Number activations, Number kv, int head_dim, uint32_t group, Kind kind);
Kernel decode_combine_kernel(Number activations, int head_dim);
Kernel project_append_kernel(Number activations, Number kv, int head_dim, Kind kind);
Kernel gather_kernel(Number kv, Kind kind);
// `rows` is the number of rows, or of pairs with one expert, for which a matrix is read once: 1, 2
// or 4 (kTileRows), and for experts 1 or 4.
Kernel products_kernel(Number activations, Packing packing, uint32_t rows);
Kernel gated_product_kernel(Number activations, Packing packing, uint32_t rows);
Kernel expert_gates_kernel(Number activations, Packing packing, uint32_t rows);
Kernel expert_downs_kernel(Number activations, Packing packing, uint32_t rows);
Kernel route_kernel(Number activations);
Kernel mix_kernel(Number activations);
// The next three kernels are for heads of 128 dimensions.
Kernel delta_prepare_kernel(Number activations, Kind kind);
Kernel delta_scan_kernel(Number activations, Kind kind);
Kernel delta_finish_kernel(Number activations, Kind kind);
Kernel zero_blocks_kernel();
Kernel copy_blocks_kernel();
Kernel mark_step_kernel();

// Returns the source text of a library of kernels. All kernels must come from one file. The text is
// this file with its includes expanded, and then an instance of the template for each kernel.
std::string library_text(const std::vector<Kernel>& kernels);

// Returns the text of a file of kernels/metal. Throws std::logic_error for an unknown name.
std::string_view embedded_text(std::string_view file);

}  // namespace quire::metal
