// Gated delta nets (Yang, Kautz, Hatamizadeh, arXiv 2412.06464):
//   S = decay S + (v - decay S k) beta k^T,   y = S q
// A layer is three commands. delta_prepare and delta_finish compute what tokens do not need of each
// other, and delta_scan the recurrence, token by token, so that cutting a sequence does not change
// results. A layer's part of a slot (kept states) is S [value_heads][D][D] in float32, and the
// convolution's newest inputs (tail) [tail_rows][conv_width] in T.
#include "rows.h"

// Eight lanes share two rows of S, of which a lane has every eighth float4. Four lanes for each row
// would load each key and query twice as often.
constant constexpr uint kRowLanes = 8;
constant constexpr uint kLaneRows = 2;
constant constexpr uint kSimdgroupRows = 32 / kRowLanes * kLaneRows;
static_assert(kSimdgroupRows == kDeltaStateRows, "as the host counts them");
// The epsilon in the length of a head's query or key, which is the same in all models.
constant constexpr float kUnitEps = 1e-6f;

// Returns the address of the layer's part of a slot (states of a sequence's recurrent layers).
template <Rows kind>
inline device uchar* slot_at(device uchar* arena, ulong slot, constant DeltaArguments& arguments) {
  if (kind == Rows::dense) {
    return arena + slot + arguments.offset;
  }
  return reinterpret_cast<device uchar*>(slot + arguments.offset);
}

// Returns the slot from which a segment starts. A segment that starts from zeros gets any valid
// address, from which nothing is read.
template <Rows kind>
inline device uchar* begun_at(
    device uchar* arena, DeltaSegment segment, const device DeltaWrite* writes,
    constant DeltaArguments& arguments) {
  const ulong slot = segment.reads != 0 ? segment.read : writes[segment.first_write].slot;
  return slot_at<kind>(arena, slot, arguments);
}

template <typename T, int D>
inline device T* tail_of(device uchar* slot, constant DeltaArguments& arguments) {
  return reinterpret_cast<device T*>(
      slot + ulong(arguments.value_heads) * uint(D * D) * sizeof(float));
}

// Returns the number of heads of D channels in a row of qkv: queries, then keys, then values.
inline uint mixed_heads(constant DeltaArguments& arguments) {
  return 2 * arguments.key_heads + arguments.value_heads;
}

inline uint key_head_of(uint head, constant DeltaArguments& arguments) {
  return head / (arguments.value_heads / arguments.key_heads);
}

inline float silu(float x) { return x / (1.0f + precise::exp(-x)); }

inline float sum_of_squares(float4 x) {
  return simd_sum(fma(x.w, x.w, fma(x.z, x.z, fma(x.y, x.y, x.x * x.x))));
}

// Computes four channels of the convolution for a token of a segment. Inputs before the segment
// come from the tail, or are zeros if there is no tail.
template <typename T>
inline float4 convolved(
    const device T* qkv, const device T* tail, const device float* conv, DeltaSegment segment,
    uint token, uint channel, uint width, constant DeltaArguments& arguments) {
  const uint kept = arguments.tail_rows;
  const uint before = token < kept ? kept - token : 0;  // taps before the segment
  const device float* weights = conv + channel;
  const device T* x = tail + ulong(token) * width + channel;
  float4 sum = float4(0.0f);
  for (uint tap = 0; tap < before; ++tap) {
    if (segment.reads != 0) {
      sum = fma(load_floats(x), load<4>(weights), sum);
    }
    x += width;
    weights += width;
  }
  x = qkv + (ulong(segment.first) + token + before - kept) * width + channel;
  for (uint tap = before; tap <= kept; ++tap) {
    sum = fma(load_floats(x), load<4>(weights), sum);
    x += width;
    weights += width;
  }
  return float4(silu(sum.x), silu(sum.y), silu(sum.z), silu(sum.w));
}

// A lane's part of a head's state: kLaneRows rows.
template <int D>
struct LaneState {
  float4 rows[kLaneRows][D / 4 / kRowLanes];
};

// A lane's part of a query or key.
template <int D>
struct LaneVector {
  float4 parts[D / 4 / kRowLanes];
};

// Returns the row of a head's state whose value and y the lane has. Lanes of one parity have the
// same row of the two that they share.
inline uint own_row(uint simdgroup, uint lane) {
  return simdgroup * kSimdgroupRows + lane / kRowLanes * kLaneRows + lane % kLaneRows;
}

// Returns the index of the lane's first float4 in a head's state.
template <int D>
inline uint first_of(uint head, uint simdgroup, uint lane) {
  const uint row = simdgroup * kSimdgroupRows + lane / kRowLanes * kLaneRows;
  return (head * uint(D) + row) * (D / 4) + lane % kRowLanes;
}

template <int D>
inline LaneState<D> read_state(const device uchar* slot, bool reads, uint first) {
  const device float4* numbers = reinterpret_cast<const device float4*>(slot);
  LaneState<D> state;
  QUIRE_UNROLL
  for (uint r = 0; r < kLaneRows; ++r) {
    QUIRE_UNROLL
    for (uint i = 0; i < D / 4 / kRowLanes; ++i) {
      state.rows[r][i] = float4(0.0f);
      if (reads) {
        state.rows[r][i] = numbers[first + r * uint(D / 4) + i * kRowLanes];
      }
    }
  }
  return state;
}

template <int D>
inline void write_state(device uchar* slot, uint first, LaneState<D> state) {
  device float4* numbers = reinterpret_cast<device float4*>(slot);
  QUIRE_UNROLL
  for (uint r = 0; r < kLaneRows; ++r) {
    QUIRE_UNROLL
    for (uint i = 0; i < D / 4 / kRowLanes; ++i) {
      numbers[first + r * uint(D / 4) + i * kRowLanes] = state.rows[r][i];
    }
  }
}

template <int D>
inline LaneVector<D> read_vector(const device float4* first) {
  LaneVector<D> vector;
  QUIRE_UNROLL
  for (uint i = 0; i < D / 4 / kRowLanes; ++i) {
    vector.parts[i] = first[i * kRowLanes];
  }
  return vector;
}

// Adds up two rows over the lanes that share them. Even lanes return the first row's sum, odd lanes
// the second row's.
inline float own_sum(float first, float second, uint lane) {
  const bool odd = (lane & 1) != 0;
  float sum = (odd ? second : first) + simd_shuffle_xor(odd ? first : second, ushort(1));
  sum += simd_shuffle_xor(sum, ushort(2));
  return sum + simd_shuffle_xor(sum, ushort(4));
}
static_assert(kRowLanes == 8 && kLaneRows == 2, "own_sum and change_state are for these");

// Multiplies a state with a query or key, and returns the product of own_row().
template <int D>
inline float product(LaneState<D> state, LaneVector<D> vector, uint lane) {
  float sum[kLaneRows];
  QUIRE_UNROLL
  for (uint r = 0; r < kLaneRows; ++r) {
    sum[r] = 0.0f;
    QUIRE_UNROLL
    for (uint i = 0; i < D / kRowLanes; ++i) {
      sum[r] = fma(state.rows[r][i / 4][i % 4], vector.parts[i / 4][i % 4], sum[r]);
    }
  }
  return own_sum(sum[0], sum[1], lane);
}

// Advances a state by a token. `value` is that of own_row().
template <int D>
inline void change_state(
    LaneVector<D> key, float value, float2 gates, uint lane, thread LaneState<D>& state) {
  QUIRE_UNROLL
  for (uint i = 0; i < kLaneRows * D / kRowLanes; ++i) {
    state.rows[i / (D / kRowLanes)][i / 4 % (D / 4 / kRowLanes)][i % 4] *= gates.x;
  }
  const float own = (value - product<D>(state, key, lane)) * gates.y;
  const float other = simd_shuffle_xor(own, ushort(1));
  QUIRE_UNROLL
  for (uint r = 0; r < kLaneRows; ++r) {
    const float change = (lane & 1) == r ? own : other;
    QUIRE_UNROLL
    for (uint i = 0; i < D / kRowLanes; ++i) {
      state.rows[r][i / 4][i % 4] =
          fma(change, key.parts[i / 4][i % 4], state.rows[r][i / 4][i % 4]);
    }
  }
}

// Writes four channels of a segment's tails to slots, after all readers of the old tail.
template <typename T, int D, Rows kind>
inline void write_tails(
    const device T* qkv, DeltaSegment segment, const device DeltaWrite* writes,
    device uchar* arena, uint channel, constant DeltaArguments& arguments) {
  const ulong width = mixed_heads(arguments) * uint(D);
  const uint kept = arguments.tail_rows;
  const device T* tail =
      tail_of<T, D>(begun_at<kind>(arena, segment, writes, arguments), arguments);
  for (uint write = 0; write < segment.writes; ++write) {
    const DeltaWrite its = writes[segment.first_write + write];
    device T* target = tail_of<T, D>(slot_at<kind>(arena, its.slot, arguments), arguments);
    for (uint i = 0; i < kept; ++i) {  // in ascending order, a tail can be shifted in place
      const uint place = its.rows + i;
      float4 x = float4(0.0f);
      if (place >= kept) {
        x = load_floats(qkv + (ulong(segment.first) + place - kept) * width + channel);
      } else if (segment.reads != 0) {
        x = load_floats(tail + place * width + channel);
      }
      store<4>(target + i * width + channel, x);
    }
  }
}

// Computes each token's queries and keys, of which it makes unit vectors, values, decays and betas.
// Queries are also scaled. Runs on (mixed_heads * 32, rows) threads: a simdgroup for each head. qkv
// is [rows][conv_width], a and b [rows][value_heads], conv [tail_rows + 1][conv_width], mixed
// [rows][mixed_heads][D], and gates [rows][value_heads].
template <typename T, int D, Rows kind>
[[kernel]] void delta_prepare(
    const device T* qkv [[buffer(0)]],
    const device T* a [[buffer(1)]],
    const device T* b [[buffer(2)]],
    const device float* conv [[buffer(3)]],
    const device float* a_log [[buffer(4)]],
    const device float* dt_bias [[buffer(5)]],
    const device DeltaSegment* segments [[buffer(6)]],
    const device DeltaWrite* writes [[buffer(7)]],
    device uchar* arena [[buffer(8)]],
    device float4* mixed [[buffer(9)]],
    device float2* gates [[buffer(10)]],
    constant DeltaArguments& arguments [[buffer(11)]],
    uint2 at [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint row = at.y;
  uint segment_index = 0;
  for (uint end = arguments.segments; end - segment_index > 1;) {
    const uint middle = (segment_index + end) / 2;
    if (segments[middle].first <= row) {
      segment_index = middle;
    } else {
      end = middle;
    }
  }
  const DeltaSegment segment = segments[segment_index];
  const device T* tail =
      tail_of<T, D>(begun_at<kind>(arena, segment, writes, arguments), arguments);
  const uint head = at.x / 32;
  const uint width = mixed_heads(arguments) * uint(D);
  float4 x = convolved(
      qkv, tail, conv, segment, row - segment.first, at.x * 4, width, arguments);
  if (head < 2 * arguments.key_heads) {
    const float scale = head < arguments.key_heads ? precise::rsqrt(float(D)) : 1.0f;
    const float factor = scale * precise::rsqrt(sum_of_squares(x) + kUnitEps);
    QUIRE_UNROLL
    for (uint i = 0; i < 4; ++i) {
      x[i] *= factor;
    }
  } else if (lane == 0) {
    const uint value_head = head - 2 * arguments.key_heads;
    const ulong gate = ulong(row) * arguments.value_heads + value_head;
    const float step = float(a[gate]) + dt_bias[value_head];
    const float softplus = max(step, 0.0f) + precise::log(1.0f + precise::exp(-max(step, -step)));
    const float decay = precise::exp(-precise::exp(a_log[value_head]) * softplus);
    gates[gate] = float2(decay, 1.0f / (1.0f + precise::exp(-float(b[gate]))));
  }
  mixed[ulong(row) * (width / 4) + at.x] = x;
}

// Runs on threadgroups of kScanThreads: in the first dimension of the grid a simdgroup for
// kDeltaStateRows rows of each head's state, in the second the segments. Simdgroups do not wait for
// each other. A token's y takes the value's place in `mixed`.
template <typename T, int D, Rows kind>
[[kernel, max_total_threads_per_threadgroup(kScanThreads)]] void delta_scan(
    device float4* mixed [[buffer(0)]],
    const device float2* gates [[buffer(1)]],
    const device DeltaSegment* segments [[buffer(2)]],
    const device DeltaWrite* writes [[buffer(3)]],
    device uchar* arena [[buffer(4)]],
    constant DeltaArguments& arguments [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint simdgroup_in_group [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint kSimdgroups = D / kSimdgroupRows;  // of a head
  const uint simdgroup = group.x * (kScanThreads / 32) + simdgroup_in_group;
  const uint head = simdgroup / kSimdgroups;
  const DeltaSegment segment = segments[group.y];
  const uint first_number = first_of<D>(head, simdgroup % kSimdgroups, lane);
  LaneState<D> state = read_state<D>(
      begun_at<kind>(arena, segment, writes, arguments), segment.reads != 0, first_number);

  const uint width = mixed_heads(arguments) * (D / 4);
  device float4* row = mixed + ulong(segment.first) * width;
  const device float4* query_at =
      row + key_head_of(head, arguments) * (D / 4) + lane % kRowLanes;
  const device float4* key_at = query_at + arguments.key_heads * (D / 4);
  device float* value_at =
      reinterpret_cast<device float*>(row + (2 * arguments.key_heads + head) * (D / 4)) +
      own_row(simdgroup % kSimdgroups, lane);
  const device float2* gate_at = gates + ulong(segment.first) * arguments.value_heads + head;
  LaneVector<D> key = read_vector<D>(key_at);
  LaneVector<D> query = read_vector<D>(query_at);
  float value = *value_at;
  float2 gate = *gate_at;
  const device DeltaWrite* write = writes + segment.first_write;
  const device DeltaWrite* end_write = write + segment.writes;
  uint due = write->rows;
  for (uint t = 1; t <= segment.count; ++t) {
    // What the next token needs is loaded as soon as there is room, so that memory stays busy. The
    // last token is loaded again.
    const uint next = t < segment.count ? 1 : 0;
    change_state<D>(key, value, gate, lane, state);
    key_at += next * width;
    key = read_vector<D>(key_at);
    value = value_at[next * width * 4];
    gate_at += next * arguments.value_heads;
    gate = *gate_at;
    const float y = product<D>(state, query, lane);
    query_at += next * width;
    query = read_vector<D>(query_at);
    if (lane % kRowLanes < kLaneRows) {
      *value_at = y;
    }
    value_at += next * width * 4;
    if (t == due) {
      write_state<D>(slot_at<kind>(arena, write->slot, arguments), first_number, state);
      ++write;
      due = write < end_write ? write->rows : 0;
    }
  }
}

// Norms and gates what delta_scan leaves in `mixed`, and writes the tails to slots. Runs on
// (value_heads * 32, rows + segments) threads: a simdgroup for each head. z and out are
// [rows][value_heads][D].
template <typename T, int D, Rows kind>
[[kernel]] void delta_finish(
    const device float4* mixed [[buffer(0)]],
    const device T* z [[buffer(1)]],
    const device float* norm [[buffer(2)]],
    const device T* qkv [[buffer(3)]],
    const device DeltaSegment* segments [[buffer(4)]],
    const device DeltaWrite* writes [[buffer(5)]],
    device uchar* arena [[buffer(6)]],
    device T* out [[buffer(7)]],
    constant DeltaArguments& arguments [[buffer(8)]],
    uint2 at [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint heads = mixed_heads(arguments);
  if (at.y >= arguments.rows) {
    for (uint i = at.x; i < heads * (D / 4); i += arguments.value_heads * 32) {
      write_tails<T, D, kind>(
          qkv, segments[at.y - arguments.rows], writes, arena, i * 4, arguments);
    }
    return;
  }
  float4 y = mixed[(ulong(at.y) * heads + 2 * arguments.key_heads) * (D / 4) + at.x];
  const ulong first = (ulong(at.y) * arguments.value_heads * 32 + at.x) * 4;
  const float scale = precise::rsqrt(sum_of_squares(y) / float(D) + arguments.eps);
  const float4 weight = load<4>(norm + lane * 4);
  const float4 gate = load_floats(z + first);
  QUIRE_UNROLL
  for (uint i = 0; i < 4; ++i) {
    y[i] = y[i] * scale * weight[i] * silu(gate[i]);
  }
  store<4>(out + first, y);
}
