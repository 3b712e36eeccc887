#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/address_range.h"
#include "core/row_table.h"
#include "core/thread_pool.h"
#include "cpu/dispatch.h"
#include "mlx/array.h"
#include "mlx/dtype.h"

// MLX primitives over the memory of K and V, on a CPU. metal_ext/_ext.pyi documents them. MLX puts
// operations in order by their arrays, but this memory is no array. So the ordering handle `token`,
// an array of one element, represents a layer's K and V. append() takes a handle and returns the
// next, and each reader of the layer takes the newest, so that reads follow writes. Writes need not
// wait for reads: a row is written once, and memory is reused only after the steps that use it.
namespace quire::ops {

namespace mx = mlx::core;

// Threads and instruction set of CPU operations, and the type to which products may round inputs.
struct CpuWorkers {
  CpuWorkers(int64_t threads, const std::string& instruction_set, const std::string& rounded)
      : pool(threads),
        kernels(cpu::select(instruction_set)),
        activations(cpu::activations_of(rounded)) {}

  ThreadPool pool;
  const cpu::Kernels& kernels;
  const cpu::Activations activations;
};

// The regions of one layer's K and V, as indices into the geometry, and their numbers' type.
struct Layer {
  int64_t key_region;
  int64_t value_region;
  mx::Dtype type;
};

// How a layer's attention makes weights of scores: softmax(query . key * scale), and what
// cpu::Softmax adds to it. `sinks` is [query_heads] float32.
struct Softmax {
  // Throws std::out_of_range for a window of no position, std::invalid_argument for what is wrong
  // with other arguments.
  Softmax(double scale, std::optional<int64_t> window, double softcap,
          std::optional<mx::array> sinks);

  // Throws std::invalid_argument unless there are no sinks, or one for each query head.
  void check_heads(int64_t query_heads) const;

  float scale;
  size_t window;  // SIZE_MAX for all positions
  float softcap;  // 0 for none
  std::optional<mx::array> sinks;
};

// Counts the bytes that block_copy copies. No other operation copies stored K or V.
class CopyCounter {
 public:
  void add(uint64_t bytes) { bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> bytes_{0};
};

// The RMS norms of queries and of keys, over head_dim. Weights are [head_dim] float32.
struct QKNorms {
  mx::array query_weight;
  mx::array key_weight;
  double eps;
};

// The rotation of heads by positions (RoPE). With n frequencies, dimensions i and i + n rotate by
// position * frequencies[i] radians, and are multiplied by the magnitude. Others are unchanged.
struct RopeTable {
  // Throws std::invalid_argument for no frequencies, too many, or numbers that are not finite.
  RopeTable(std::vector<double> frequencies, double magnitude);

  // Throws std::invalid_argument if a head has fewer dimensions than the table rotates.
  void check_head_dim(int head_dim) const;

  const std::vector<double> frequencies;  // [pairs]
  const double magnitude;
};

using Rows = std::shared_ptr<const RowTable>;
using Rope = std::shared_ptr<const RopeTable>;
using Workers = std::shared_ptr<CpuWorkers>;

mx::array append(
    const mx::array& token, const mx::array& keys, const mx::array& values, const Rows& rows,
    const Layer& layer, const Workers& workers);

mx::array rope_angles(const Rows& rows, const Rope& rope, const Workers& workers);

std::pair<mx::array, mx::array> project_append(
    const mx::array& token, const mx::array& queries, const mx::array& keys,
    const mx::array& values, const std::optional<QKNorms>& norms,
    const std::optional<mx::array>& angles, const Rows& rows, const Layer& layer,
    const Workers& workers);

mx::array decode_attention(
    const mx::array& token, const mx::array& queries, const Rows& rows, int64_t first_row,
    const Layer& layer, int64_t kv_heads, const Softmax& softmax, const Workers& workers);

mx::array chunk_attention(
    const mx::array& token, const mx::array& queries, const Rows& rows, int64_t segment,
    const Layer& layer, int64_t kv_heads, const Softmax& softmax, const Workers& workers);

// Returns a view of a region's rows [first, tokens), valid while they are mapped.
mx::array region_view(
    const mx::array& token, const std::shared_ptr<AddressRange>& range, int64_t region,
    int64_t tokens, int64_t kv_heads, int64_t head_dim, mx::Dtype type, int64_t first);

// Returns an alias whose data_size is 0. Throws std::invalid_argument for an array that is not
// evaluated.
mx::array uncounted(const mx::array& array, bool transposable);

mx::array block_copy(
    const mx::array& token, const std::shared_ptr<AddressRange>& source, int64_t source_block,
    const std::shared_ptr<AddressRange>& target, int64_t target_block, int64_t tokens,
    const std::shared_ptr<CopyCounter>& counter);

}  // namespace quire::ops
