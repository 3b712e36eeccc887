// The arguments that C++ code passes to the Metal kernels. C++ and Metal code include this file.
// Members have fixed sizes and natural alignment without holes, so that both see the same bytes.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#else
#include <cstdint>
#endif

namespace quire {
namespace metal {

enum : uint32_t {
  kSplitTokens = 256,       // the most positions that a threadgroup of decode_split reads
  kShortSplitTokens = 128,  // for short rows, which would give too few threadgroups
  kShortRowTokens = 2048,   // rows at lower positions are short
  kMostTileHeads = 8,       // query heads that share a threadgroup's reads of one KV head
  kDecodeThreads = 256,     // threads of a threadgroup of decode_split
  kMaxHeadDim = 256,
  kScanThreads = 64,    // threads of a threadgroup of delta_scan
  kDeltaStateRows = 8,  // rows of a head's state that a simdgroup of it has
  kProductThreads = 64,  // threads of a threadgroup of products
  kProductOutputs = 8,   // outputs that such a threadgroup computes
  kGateOutputs = 4,      // of gate and of up each
  kProductMatrices = 4,  // the most matrices that a command of products multiplies
  kRouteThreads = 256,  // threads of the threadgroup of route
  kTileRows = 4,        // the most rows for which a product reads a matrix once
  kMaxExperts = 512,
  kMaxPairs = 1024,  // the most pairs of a row and an expert that route sorts
};

// The formats of weights that products read (multiply.h): numbers as they are, MLX's affine codes
// of 4 and 8 bits, and MXFP4.
enum class Packing : uint32_t { plain, affine4, affine8, mxfp4 };

// Returns the first position that the row at `position` sees. A window of 0 hides nothing.
inline uint32_t first_seen(uint32_t position, uint32_t window) {
  return window == 0 || position < window ? 0 : position + 1 - window;
}

// Returns the number of positions in each split of a row's keys; the last split may have fewer.
// `last` is the row's position, from the first that it sees. So the order of summation depends on
// the position and the window alone.
inline uint32_t split_tokens(uint32_t last) {
  return last < kSplitTokens || last >= kShortRowTokens ? kSplitTokens : kShortSplitTokens;
}
inline uint32_t split_count(uint32_t last) { return last / split_tokens(last) + 1; }

// Returns the number of heads in each tile of a group of query heads that share a KV head. Tiles
// are as few as possible, so that K and V are read seldom, and then as small as possible.
inline uint32_t tile_heads(uint32_t group) {
  const uint32_t tiles = (group + kMostTileHeads - 1) / kMostTileHeads;
  const uint32_t heads = (group + tiles - 1) / tiles;
  return heads <= 4 ? 4 : heads <= 6 ? 6 : 8;
}

// An entry of the row table: the place of the K and V of one row (token) of a step.
struct RowEntry {
  // With sparse memory, the GPU address of the buffer with the layer's regions. With dense memory,
  // the offset in the arena, the buffer that all sequences share. Unused with paged memory.
  uint64_t base;
  uint32_t position;    // position of the token in its sequence
  uint32_t first_page;  // index of the sequence's first entry in the page table, if paged
};

// The place of a layer's K and V in a sequence's buffer (sparse, dense) or in a heap (paged).
//   sparse  address of token t = row.base + key_offset + t * row_bytes
//   dense                      = arena + row.base + key_offset + t * row_bytes
//   paged                      = pages[row.first_page + (t >> block_shift)] + key_offset
//                                + (t % (1 << block_shift)) * row_bytes
struct LayerPlace {
  uint64_t key_offset;
  uint64_t value_offset;
  uint32_t row_bytes;
  uint32_t block_shift;  // a paged block has 1 << block_shift tokens (no slow divisions)
};

// The work of one threadgroup of decode_split: one split of one row's keys.
struct DecodeTask {
  uint32_t row;  // index of the row in the call
  uint32_t split;
};

struct AttentionArguments {
  LayerPlace place;
  uint32_t query_heads;
  uint32_t kv_heads;
  uint32_t first_row;  // index of the call's row 0 in the row table
  float scale;
  float softcap;   // scores become softcap * tanh(score / softcap), unless it is 0
  uint32_t window;  // the number of newest positions that a row sees; 0 for all
  uint32_t sinks;   // 1 if there are sinks: logits of a key without a value, one for each head
  uint32_t unused;
};

struct AppendArguments {
  LayerPlace place;
  uint32_t row_elements;  // kv_heads * head_dim
  uint32_t rows;
};

// The arguments of project_append, which applies RMS norms to queries and keys, and then RoPE.
struct ProjectArguments {
  LayerPlace place;
  uint32_t query_heads;
  uint32_t kv_heads;
  uint32_t rows;
  uint32_t normed;  // 1 if the model has these norms, else 0
  uint32_t turned;  // number of a head's first pairs, which rotate
  float eps;        // epsilon of the norms
  float magnitude;  // factor by which rotated dimensions are multiplied
  uint32_t unused;
  float frequencies[kMaxHeadDim / 2];  // radians per position, of dimensions i and i + turned
};

// The arguments of gather, which copies positions [first, first + tokens) of one sequence.
struct GatherArguments {
  LayerPlace place;
  uint32_t row_elements;
  uint32_t tokens;
  uint32_t row;  // index of any row of the sequence in the row table
  uint32_t first;
};

// What a gate g makes of u: SiLU(g) * u, or what cpu::Gate says of the others.
enum : uint32_t { kSilu = 0, kGeluTanh = 1, kClampedSilu = 2 };

// The arguments of products and of gated_product.
struct ProductArguments {
  uint32_t inputs;  // numbers of a row of x
  uint32_t rows;
  uint32_t matrices;
  uint32_t group_shift;  // 1 << group_shift numbers share a scale
  uint32_t added;        // bit i: add the bias of linear layer i
  uint32_t residual;     // 1 to add the residual
  uint32_t gate;         // what gated_product does: kSilu, kGeluTanh or kClampedSilu
  uint32_t unused;
  uint32_t outputs[kProductMatrices];
  uint32_t first_tiles[kProductMatrices];  // index of each matrix's first tile of outputs
};

struct RouteArguments {
  uint32_t rows;
  uint32_t experts;
  uint32_t chosen;
  uint32_t normalised;  // 1 if the weights of a row add up to 1
  uint32_t shared;      // 1 if every row also has a pair with the shared expert
  uint32_t tiles;       // number of tiles to write
};

// Pairs of a row and an expert, which all have the same expert (route.metal).
struct ExpertTile {
  uint32_t expert;
  uint32_t first;  // index in `order` of the first pair
  uint32_t count;  // number of pairs; 0 if there is nothing to do
  uint32_t unused;
};

// The arguments of expert_gates and of expert_downs.
struct ExpertArguments {
  uint32_t inputs;
  uint32_t outputs;  // of one expert
  uint32_t stride;   // outputs from one expert of a stack to the next
  uint32_t experts;
  uint32_t pairs;  // without those of the shared expert
  uint32_t chosen;
  uint32_t group_shift;
  uint32_t added;  // 1 to add the experts' biases [experts][stride]
  uint32_t gate;
  uint32_t unused;
};

struct MixArguments {
  uint32_t hidden;
  uint32_t rows;
  uint32_t chosen;
  uint32_t shared;  // 1 to add the shared expert's outputs
};

// Consecutive rows of one sequence, whose recurrence starts from the states in a slot. `read` is
// the slot's GPU address, or with dense memory the slot's offset in the buffer of all slots.
struct DeltaSegment {
  uint64_t read;
  uint32_t reads;        // 1 to start from the slot, 0 to start from zeros
  uint32_t first;        // index of the segment's first row in the step
  uint32_t count;
  uint32_t first_write;  // index of the segment's first write
  uint32_t writes;       // number of writes; the state after the rows behind the last is not kept
  uint32_t unused;
};

// An instruction to write the states to `slot` after the segment's first `rows` rows.
struct DeltaWrite {
  uint64_t slot;
  uint32_t rows;
  uint32_t unused;
};

struct DeltaArguments {
  uint64_t offset;  // bytes before the layer's part of every slot
  uint32_t key_heads;
  uint32_t value_heads;
  uint32_t tail_rows;  // earlier rows that the convolution reads
  uint32_t segments;
  float eps;  // epsilon of the norm
  uint32_t rows;  // of all segments
};

// The arguments of zero_blocks and copy_blocks. The strides are the distances between regions.
struct BlockArguments {
  uint64_t source;  // GPU addresses
  uint64_t target;
  uint64_t source_stride;
  uint64_t target_stride;
  uint64_t bytes;  // bytes of each region; a multiple of 16
  uint32_t regions;
  uint32_t unused;
};

}  // namespace metal
}  // namespace quire
