#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/linear.h"

// The CPU kernels. They compute on plain pointers, without MLX, blocks of K and V, or threads.
namespace quire::cpu {

enum class KVType { bfloat16, float32 };

constexpr size_t size_of(KVType type) { return type == KVType::bfloat16 ? 2 : 4; }

// Attention reads the keys in tiles (one softmax step each) and splits (one partial result each).
// Both are cut from position 0 on, so a row's order of summation depends on its position alone.
constexpr size_t kTileTokens = 64;
constexpr size_t kSplitTokens = 256;

constexpr size_t kMaxQueryHeads = 256;

template <size_t D>
struct HeadDim {
  static constexpr size_t value = D;
};

constexpr size_t kMaxHeadDim = 256;

// Calls body(HeadDim<head_dim>{}) if the kernels are built for this head_dim, or does nothing.
template <class Body>
void for_head_dim(size_t head_dim, const Body& body) {
  switch (head_dim) {
    case 32: return body(HeadDim<32>{});
    case 64: return body(HeadDim<64>{});
    case 128: return body(HeadDim<128>{});
    case kMaxHeadDim: return body(HeadDim<kMaxHeadDim>{});
    default: return;
  }
}

constexpr size_t splits_of(size_t tokens) {
  return (tokens + kSplitTokens - 1) / kSplitTokens;
}

// The shape of a layer's heads. A token's row of K or V is [kv_heads][head_dim]. Rows are adjacent.
struct HeadShape {
  size_t query_heads;
  size_t kv_heads;
  size_t head_dim;
  KVType type;

  constexpr size_t group() const { return query_heads / kv_heads; }  // query heads of one KV head
  constexpr size_t query_floats() const { return query_heads * head_dim; }
  constexpr size_t row_elements() const { return kv_heads * head_dim; }
  constexpr size_t row_bytes() const { return row_elements() * size_of(type); }
};

// What a layer's softmax has beside a scale.
struct Softmax {
  size_t window = SIZE_MAX;      // the number of newest positions that a row sees, with its own
  float softcap = 0.0f;          // scores become softcap * tanh(score / softcap), unless it is 0
  const float* sinks = nullptr;  // [query_heads]: logits of a key without a value, or null

  // Returns the first position that the row at `position` sees. Kernels read no row before it.
  constexpr size_t first_seen(size_t position) const {
    return position < window ? 0 : position + 1 - window;
  }
};

// The KV heads [first, first + count) of a layer.
struct HeadRun {
  size_t first;
  size_t count;

  constexpr size_t end() const { return first + count; }
};

// The attention of one row over a part of the keys, before the division by the sum of weights.
struct Partial {
  float* highest;  // [query_heads]: the highest score
  float* weight;   // [query_heads]: the sum of exp(score - highest)
  float* values;   // [query_heads][head_dim]: the weighted sum of values, in kernel order (Kernels)

  static constexpr size_t floats(size_t heads, size_t head_dim) { return heads * (head_dim + 2); }
  static Partial at(float* memory, size_t heads) {
    return {memory, memory + heads, memory + 2 * heads};
  }
};

// An attend_chunk call has at most kChunkRows rows. It converts kKeyTokens keys to float32 at a
// time, so that these keys fit in the first-level cache beside the queries.
constexpr size_t kChunkRows = 32;
constexpr size_t kKeyTokens = 16;
constexpr size_t kValueDims = 64;

// What a gated MLP makes of the outputs g and u of its matrices "gate" and "up".
enum class Gate {
  silu,          // g * sigmoid(g) * u
  gelu_tanh,     // gelu(g) * u, with the approximation of gelu by tanh
  clamped_silu,  // g * sigmoid(1.702 g) * (u + 1), of g up to 7 and u from -7 to 7
};

// The operations on one float32 row between a layer's matrix products. `out` may equal an input.
struct LayerKernels {
  // Computes x / sqrt(mean(x^2) + eps) * weight, [n] each.
  void (*rms_norm)(const float* x, const float* weight, float eps, size_t n, float* out);

  // Gates `up`, [n] each.
  void (*gate)(Gate, const float* gates, const float* up, size_t n, float* out);

  // Rotates a head by RoPE. `angles` has head_dim / 2 cosines, then as many sines.
  void (*rotate)(const float* x, const float* angles, size_t head_dim, float* out);

  // Computes to += x, [n] each.
  void (*add)(const float* x, size_t n, float* to);

  // Computes to += scale * x, [n] each.
  void (*add_scaled)(const float* x, float scale, size_t n, float* to);

  // Computes e^x / (sum of all e^x), [n] each. A NaN or a positive infinity makes all results NaN.
  void (*softmax)(const float* x, size_t n, float* out);
};

// A value head of a gated delta net. Its state is [value_dim][key_dim]; both are multiples of 16.
struct DeltaHead {
  size_t key_dim;
  size_t value_dim;
};

// Consecutive tokens of one value head. Rows of queries, keys, values are `stride` numbers apart.
struct DeltaRun {
  size_t count;
  const float* from;  // the state before the tokens, or null for a state of zeros
  float* to;          // the state after the tokens; may be `from`
  const float* queries;
  const float* keys;
  const float* values;
  size_t stride;
  const float* decays;  // [count]
  const float* betas;   // [count]
  float* out;           // rows [value_dim], out_stride numbers apart
  size_t out_stride;
};

// The operations of a gated delta net between its matrix products, in float32.
struct DeltaKernels {
  // Computes SiLU(sum over taps of rows[tap] * weights[tap * stride + i]). A null row means zeros.
  void (*convolve)(
      const float* const* rows, const float* weights, size_t taps, size_t stride, size_t n,
      float* out);

  // Computes x * scale / sqrt(sum(x^2) + eps), [n] each. `out` may be `x`.
  void (*normalize)(const float* x, float eps, float scale, size_t n, float* out);

  // Runs the recurrence token by token, so that results do not depend on the cuts between runs.
  void (*recur)(const DeltaHead&, const DeltaRun&);
};

// A token's score is (logit - highest) * scale + noise. The bits of its hash as a float have two
// halves: the noise is noise[upper] + noise[kNoiseNumbers + upper] * lower.
struct Scoring {
  float highest;
  float scale;
  float floor;
  uint32_t key[2];
  const float* noise;
};
constexpr size_t kNoiseNumbers = 1 << 16;

struct Leader {
  float score;
  uint32_t token;
};

// Functions over [n] logits or weights, to choose a token. Sums are computed in double.
struct ChooseKernels {
  // Returns the largest number that is not NaN, or -inf. Sets `finite` to true if all are finite.
  float (*largest)(const float* x, size_t n, bool* finite);

  // Sets weights[i] to e^((x[i] - highest) * scale), or to 0 for NaN. Returns the weights' sum.
  double (*weigh)(const float* x, float highest, float scale, size_t n, float* weights);

  // Copies the weights that are at least `least` to `out`, in order. Returns the number of copies.
  size_t (*collect)(const float* weights, float least, size_t n, float* out);

  // Returns the first of the tokens from `first` on that have the largest score and weigh at least
  // the floor, or `first` if it cannot be the row's. A score has the same bits on any set.
  Leader (*lead)(const Scoring&, const float* x, const float* weights, size_t n, uint32_t first);
};

// The functions of one instruction set. "Kernel order" is the order of a head's dimensions in which
// pairs of bfloat16 become floats without a shuffle. prepare_queries makes it, finish undoes it.
struct Kernels {
  const char* name;

  // Rounds float32 to bfloat16, to nearest even. Every NaN becomes 0x7fc0, as in MLX.
  void (*to_bfloat16)(const float* source, uint16_t* target, size_t count);
  void (*from_bfloat16)(const uint16_t* source, float* target, size_t count);

  // Sets `target` to the queries [query_heads][head_dim] times `scale`, in kernel order.
  void (*prepare_queries)(const HeadShape&, const float* queries, float scale, float* target);

  // Computes the attention of one row over the keys [skip, tokens) of a split, for some KV heads.
  // `keys` and `values` point to the split's first position; `tokens` is 1 to kSplitTokens. Writes
  // only those parts of `out` that belong to the query heads of these KV heads.
  void (*attend_split)(
      const HeadShape&, float softcap, const HeadRun& kv_heads, const float* prepared,
      const void* keys, const void* values, size_t skip, size_t tokens, Partial out);

  // Combines a row's `count` adjacent partials into out [query_heads][head_dim], in natural order.
  void (*finish)(
      const HeadShape&, const float* sinks, const float* partials, size_t count, float* out);

  // Computes the attention of `rows` (1 to kChunkRows) rows from `position` on, for one KV head. A
  // row attends to the keys that it sees up to its own. `prepared` and `out` point to the KV head's
  // first query head in the first row; rows are query_floats() apart. `keys` and `values` point to
  // position 0.
  void (*attend_chunk)(
      const HeadShape&, const Softmax&, size_t kv_head, const float* prepared, const void* keys,
      const void* values, size_t rows, size_t position, float* out, float* scratch);

  LinearKernels linear;
  LayerKernels layer;
  DeltaKernels delta;
  ChooseKernels choose;
};

// Returns the number of scratch floats that attend_chunk needs.
constexpr size_t chunk_scratch_floats(const HeadShape& shape) {
  const size_t heads = kChunkRows * shape.group();
  return kKeyTokens * shape.head_dim + kTileTokens * kValueDims +
         heads * (kTileTokens + shape.head_dim + 1) +
         2 * Partial::floats(heads, shape.head_dim);
}

}  // namespace quire::cpu
