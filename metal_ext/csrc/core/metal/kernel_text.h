#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

// The kernels of kernels/metal by name, and the text that each is compiled from at run time.
namespace quire::metal {

// How a sequence's rows are found: the kernels' three ways (kernels/metal/arguments.h).
enum class Kind { sparse, paged, dense };
// "sparse", "paged", "dense".
const char* name_of(Kind kind);

enum class Number { float32, float16, bfloat16 };

// Threads of a threadgroup of the kernels that move bytes.
inline constexpr size_t kCopyThreads = 256;

struct Kernel {
  std::string name;        // what the compiled library calls it, e.g. "append_half_bfloat_paged"
  std::string file;        // of kernels/metal
  size_t threads;          // of a threadgroup: as many as the host dispatches at most
  std::string expression;  // the template's instance; empty where the kernel is no template
};

// `activations` is the type of queries, keys, values and results as MLX has them, `kv` the type of
// the rows. head_dim is 64, 128 or 256: anything else is a std::logic_error.
Kernel append_kernel(Number activations, Number kv, Kind kind);
Kernel decode_split_kernel(Number activations, Number kv, int head_dim, Kind kind);
Kernel decode_combine_kernel(Number activations, int head_dim);
Kernel project_append_kernel(Number activations, Number kv, int head_dim, Kind kind);
Kernel gather_kernel(Number kv, Kind kind);
Kernel swiglu_kernel(Number activations);
// These two have heads of 128 dimensions.
Kernel gated_delta_kernel(Number activations, Kind kind);
Kernel delta_tails_kernel(Number activations, Kind kind);
Kernel zero_blocks_kernel();
Kernel copy_blocks_kernel();
Kernel mark_step_kernel();

// The complete text of a library that holds these kernels, which are all of one file: what the file
// includes of ours stands before it, and lines that instantiate its templates behind it.
std::string library_text(const std::vector<Kernel>& kernels);

// A file of kernels/metal, as it was when the extension was built (kernels/metal/embed.cmake).
// Throws std::logic_error where there is none of that name.
std::string_view embedded_text(std::string_view file);

}  // namespace quire::metal
