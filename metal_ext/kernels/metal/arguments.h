// The arguments that the host passes to the kernels, for MSL and for C++. Members have fixed sizes
// and natural alignment, without holes: both sides see the same bytes.
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
  kTileHeads = 4,           // query heads that share a threadgroup's reads of one KV head
  kDecodeThreads = 256,     // threads of a threadgroup of decode_split
  kMaxHeadDim = 256,
  kSwigluNumbers = 4,  // numbers that a thread of swiglu computes
  kDeltaThreads = 512,  // threads of a threadgroup of gated_delta
};

// Returns the positions in each split of a row's keys; the last split may have fewer. The cut
// depends on the row's position alone, and so does the order of summation.
inline uint32_t split_tokens(uint32_t position) {
  return position < kSplitTokens || position >= kShortRowTokens ? kSplitTokens
                                                                : kShortSplitTokens;
}
inline uint32_t split_count(uint32_t position) { return position / split_tokens(position) + 1; }

// Where the K and V of one row (token) of a step lie.
struct RowEntry {
  // sparse: the GPU address of the buffer with the layer's regions. dense: the offset in the arena
  // (the one buffer). paged: not used.
  uint64_t base;
  uint32_t position;    // position of the token in its sequence
  uint32_t first_page;  // paged: index of the sequence's first entry in the page table
};

// The regions (K and V) of one layer in a sequence's buffer (sparse, dense) or in a heap (paged).
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

// The work of a threadgroup: one split of one row's keys.
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
};

struct AppendArguments {
  LayerPlace place;
  uint32_t row_elements;  // kv_heads * head_dim
  uint32_t rows;
};

// The arguments of q's and k's RMS norm over head_dim, and of RoPE (halves, not pairs), if any.
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

// Copies rows [0, tokens) of one sequence into contiguous arrays [tokens][row_elements].
struct GatherArguments {
  LayerPlace place;
  uint32_t row_elements;
  uint32_t tokens;
  uint32_t row;  // index of any row of the sequence in the row table
  uint32_t unused;
};

// Consecutive rows of one sequence, which start from a slot (the states of recurrent layers). A
// slot is given by its GPU address, or on dense by its offset in the arena.
struct DeltaSegment {
  uint64_t read;
  uint32_t reads;        // 1 to start from the slot, 0 to start from zeros
  uint32_t first;        // index of the segment's first row in the step
  uint32_t count;
  uint32_t first_write;  // index of the segment's first write; the last write is after all rows
};

// Writes the state to the slot after the segment's first `rows` rows.
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
  uint32_t unused;
};

// Fills or copies `bytes` bytes of each region. Regions lie source_stride and target_stride apart.
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
