// The arguments that the host passes to the kernels: one text for MSL and for C++. Members have
// fixed sizes and natural alignment, without holes, so that both sides see the same bytes.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#else
#include <cstdint>
#endif

namespace quire {
namespace metal {

enum : uint32_t {
  kSplitTokens = 256,       // positions of a row that one threadgroup of decode_split reads at most
  kShortSplitTokens = 128,  // of short rows, which too few threadgroups would read otherwise
  kShortRowTokens = 2048,   // positions of a short row at most
  kTileHeads = 4,           // query heads of a KV head that share that reading
  kDecodeThreads = 256,     // of a threadgroup of decode_split
  kMaxHeadDim = 256,
  kSwigluNumbers = 4,  // of a thread of swiglu
  kDeltaThreads = 512,  // of a threadgroup of gated_delta
};

// Positions of each split of a row whose last one is `position`; the last split may have fewer.
// A row that fits one split has one, as nothing is left to combine then. Nothing but the position
// counts: a row is summed in the same order in any company.
inline uint32_t split_tokens(uint32_t position) {
  return position < kSplitTokens || position >= kShortRowTokens ? kSplitTokens
                                                                : kShortSplitTokens;
}
inline uint32_t split_count(uint32_t position) { return position / split_tokens(position) + 1; }

// Where one row of the flat token array stands.
struct RowEntry {
  // sparse: GPU address of the sequence's buffer that holds the layer's regions. dense: bytes from
  // the start of the arena. paged: not used.
  uint64_t base;
  uint32_t position;    // of the token in its sequence
  uint32_t first_page;  // paged: index of the sequence's first entry in the page table
};

// The regions of one layer inside a sequence's buffer (sparse, dense), or inside an extent (paged).
//
//   sparse  address of token t = row.base + key_offset + t * row_bytes
//   dense                      = arena + row.base + key_offset + t * row_bytes
//   paged                      = pages[row.first_page + (t >> block_shift)] + key_offset
//                                + (t % (1 << block_shift)) * row_bytes
struct LayerPlace {
  uint64_t key_offset;
  uint64_t value_offset;
  uint32_t row_bytes;
  uint32_t block_shift;  // paged: a block has 1 << block_shift tokens; a GPU divides slowly
};

// Split number `split` of a row.
struct DecodeTask {
  uint32_t row;  // of the call
  uint32_t split;
};

struct AttentionArguments {
  LayerPlace place;
  uint32_t query_heads;
  uint32_t kv_heads;
  uint32_t first_row;  // the call's row 0 in the row table
  float scale;
};

struct AppendArguments {
  LayerPlace place;
  uint32_t row_elements;  // kv_heads * head_dim
  uint32_t rows;
};

// RMS norm of q and k over head_dim, then RoPE (halves, not pairs), each where the model has it;
// then the row is appended.
struct ProjectArguments {
  LayerPlace place;
  uint32_t query_heads;
  uint32_t kv_heads;
  uint32_t rows;
  uint32_t normed;  // 1 where there is a norm
  uint32_t turned;  // pairs of dimensions that turn, the first of a head
  float eps;        // of the norms
  float magnitude;  // factor of the dimensions that turn
  uint32_t unused;
  float frequencies[kMaxHeadDim / 2];  // radians per position, of dimensions i and i + turned
};

// Rows [0, tokens) of one sequence, into contiguous arrays [tokens][row_elements].
struct GatherArguments {
  LayerPlace place;
  uint32_t row_elements;
  uint32_t tokens;
  uint32_t row;  // any row of the sequence, in the row table
  uint32_t unused;
};

// Consecutive rows of one sequence, which begin with what a cell holds. Cells are GPU addresses, or
// bytes from the start of the arena where rows are dense.
struct DeltaSegment {
  uint64_t read;
  uint32_t reads;        // whether there is such a cell, or zeros: 1 or 0
  uint32_t first;        // row
  uint32_t count;
  uint32_t first_write;  // writes follow each other, up to the one after all rows
};

// After the first `rows` rows of its segment the state is written to that cell.
struct DeltaWrite {
  uint64_t cell;
  uint32_t rows;
  uint32_t unused;
};

struct DeltaArguments {
  uint64_t offset;  // of the layer, in every cell
  uint32_t key_heads;
  uint32_t value_heads;
  uint32_t tail_rows;  // that the convolution reads again
  uint32_t segments;
  float eps;  // of the norm
  uint32_t unused;
};

// The same bytes of `regions` regions that lie `source_stride` and `target_stride` apart.
struct BlockArguments {
  uint64_t source;  // GPU addresses
  uint64_t target;
  uint64_t source_stride;
  uint64_t target_stride;
  uint64_t bytes;  // of each region; a multiple of 16
  uint32_t regions;
  uint32_t unused;
};

}  // namespace metal
}  // namespace quire
