// Gated delta nets (Yang, Kautz, Hatamizadeh, arXiv 2412.06464):
//   S = decay S + (v - decay S k) beta k^T,   y = S q
// One kernel computes the layer. Another one writes the convolution's newest inputs (tail). Tokens
// are computed one by one, so cutting a sequence does not change results. A layer's part of a slot
// (kept states) is S [value_heads][D][D] in float32, and the tail [tail_rows][conv_width] in T.
#include "rows.h"

constant constexpr uint kDeltaSimdgroups = kDeltaThreads / 32;
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

template <typename T, int D>
inline const device T* tail_of(const device uchar* slot, constant DeltaArguments& arguments) {
  return reinterpret_cast<const device T*>(
      slot + ulong(arguments.value_heads) * uint(D * D) * sizeof(float));
}

inline uint conv_width(uint dims, constant DeltaArguments& arguments) {
  return (2 * arguments.key_heads + arguments.value_heads) * dims;
}

inline float silu(float x) { return x / (1.0f + precise::exp(-x)); }

// Returns one channel's convolution for a token of a segment (run of tokens). Inputs before the
// segment come from the tail (the newest inputs in a slot), or are zeros if there is no tail.
template <typename T>
inline float convolved(
    const device T* qkv, const device T* tail, bool has_tail, const device float* weights,
    DeltaSegment segment, uint token, uint channel, uint width,
    constant DeltaArguments& arguments) {
  float sum = 0.0f;
  for (uint tap = 0; tap <= arguments.tail_rows; ++tap) {
    const uint place = token + tap;
    float x = 0.0f;
    if (place >= arguments.tail_rows) {
      const ulong row = segment.first + place - arguments.tail_rows;
      x = float(qkv[row * width + channel]);
    } else if (has_tail) {
      x = float(tail[ulong(place) * width + channel]);
    }
    sum = fma(x, weights[ulong(tap) * width + channel], sum);
  }
  return silu(sum);
}

// Computes a lane's N numbers of the vector x * scale / sqrt(sum(x^2) + eps).
template <int N>
inline void unit_part(const threadgroup float* x, uint lane, float scale, thread float* part) {
  float squares = 0.0f;
  QUIRE_UNROLL
  for (uint i = 0; i < N; ++i) {
    part[i] = x[lane * N + i];
    squares = fma(part[i], part[i], squares);
  }
  const float factor = scale * precise::rsqrt(simd_sum(squares) + kUnitEps);
  QUIRE_UNROLL
  for (uint i = 0; i < N; ++i) {
    part[i] *= factor;
  }
}

// Runs on (value_heads, segments) threadgroups of kDeltaThreads. qkv is [rows][conv_width], z and
// out [rows][value_heads][D], a and b [rows][value_heads], and conv [tail_rows + 1][conv_width].
template <typename T, int D, Rows kind>
[[kernel, max_total_threads_per_threadgroup(kDeltaThreads)]] void gated_delta(
    const device T* qkv [[buffer(0)]],
    const device T* z [[buffer(1)]],
    const device T* a [[buffer(2)]],
    const device T* b [[buffer(3)]],
    const device float* conv [[buffer(4)]],
    const device float* a_log [[buffer(5)]],
    const device float* dt_bias [[buffer(6)]],
    const device float* norm [[buffer(7)]],
    const device DeltaSegment* segments [[buffer(8)]],
    const device DeltaWrite* writes [[buffer(9)]],
    device uchar* arena [[buffer(10)]],
    device T* out [[buffer(11)]],
    constant DeltaArguments& arguments [[buffer(12)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint kNumbers = D / 32;  // numbers of a state's row in a lane
  constexpr uint kStateRows = D / kDeltaSimdgroups;  // rows of the state in a simdgroup
  threadgroup float mixed[3 * D];  // the token's queries, keys and values
  threadgroup float made[D];

  const uint head = group.x;
  const DeltaSegment segment = segments[group.y];
  const uint width = conv_width(D, arguments);
  const uint key_head = head / (arguments.value_heads / arguments.key_heads);
  const bool reads = segment.reads != 0;
  // A segment that starts from zeros gets any valid address, from which nothing is read.
  const ulong begun = reads ? segment.read : writes[segment.first_write].slot;
  const device uchar* slot = slot_at<kind>(arena, begun, arguments);
  const device T* tail = tail_of<T, D>(slot, arguments);
  const ulong own = (ulong(head) * D + simdgroup * kStateRows) * D + lane * kNumbers;

  float state[kStateRows][kNumbers];
  QUIRE_UNROLL
  for (uint r = 0; r < kStateRows; ++r) {
    QUIRE_UNROLL
    for (uint i = 0; i < kNumbers; ++i) {
      state[r][i] =
          reads ? reinterpret_cast<const device float*>(slot)[own + r * uint(D) + i] : 0.0f;
    }
  }

  uint next_write = segment.first_write;
  const uint end_write = segment.first_write + segment.writes;
  for (uint token = 0; token < segment.count; ++token) {
    const ulong row = segment.first + token;
    for (uint i = thread_index; i < 3 * D; i += kDeltaThreads) {
      const uint part = i / uint(D);  // 0: queries, 1: keys, 2: values
      const uint first = part == 2 ? 2 * arguments.key_heads + head
                                   : part * arguments.key_heads + key_head;
      mixed[i] = convolved(
          qkv, tail, reads, conv, segment, token, first * uint(D) + i % uint(D), width, arguments);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float query[kNumbers];
    float key[kNumbers];
    unit_part<kNumbers>(mixed, lane, precise::rsqrt(float(D)), query);
    unit_part<kNumbers>(mixed + D, lane, 1.0f, key);
    const ulong gate = row * arguments.value_heads + head;
    const float x = float(a[gate]) + dt_bias[head];
    const float softplus = max(x, 0.0f) + precise::log(1.0f + precise::exp(-max(x, -x)));
    const float decay = precise::exp(-precise::exp(a_log[head]) * softplus);
    const float beta = 1.0f / (1.0f + precise::exp(-float(b[gate])));

    QUIRE_UNROLL
    for (uint r = 0; r < kStateRows; ++r) {
      float recalled = 0.0f;
      QUIRE_UNROLL
      for (uint i = 0; i < kNumbers; ++i) {
        state[r][i] *= decay;
        recalled = fma(state[r][i], key[i], recalled);
      }
      const uint value = simdgroup * kStateRows + r;
      const float change = (mixed[2 * D + value] - simd_sum(recalled)) * beta;
      float sum = 0.0f;
      QUIRE_UNROLL
      for (uint i = 0; i < kNumbers; ++i) {
        state[r][i] = fma(change, key[i], state[r][i]);
        sum = fma(state[r][i], query[i], sum);
      }
      const float y = simd_sum(sum);
      if (lane == 0) {
        made[value] = y;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float squares = 0.0f;
    QUIRE_UNROLL
    for (uint i = 0; i < kNumbers; ++i) {
      const float y = made[lane * kNumbers + i];
      squares = fma(y, y, squares);
    }
    const float scale = precise::rsqrt(simd_sum(squares) / float(D) + arguments.eps);
    for (uint i = thread_index; i < D; i += kDeltaThreads) {
      const ulong at = gate * uint(D) + i;
      out[at] = static_cast<T>(made[i] * scale * norm[i] * silu(float(z[at])));
    }

    if (next_write < end_write && token + 1 == writes[next_write].rows) {
      device float* target = reinterpret_cast<device float*>(
          slot_at<kind>(arena, writes[next_write].slot, arguments));
      QUIRE_UNROLL
      for (uint r = 0; r < kStateRows; ++r) {
        QUIRE_UNROLL
        for (uint i = 0; i < kNumbers; ++i) {
          target[own + r * uint(D) + i] = state[r][i];
        }
      }
      ++next_write;
    }
  }
}

// Writes the convolution's newest inputs (tail) to slots. This kernel runs after gated_delta, in
// which all value heads read the old tail. Runs on (conv_width, segments) threads.
template <typename T, int D, Rows kind>
[[kernel]] void delta_tails(
    const device T* qkv [[buffer(0)]],
    const device DeltaSegment* segments [[buffer(1)]],
    const device DeltaWrite* writes [[buffer(2)]],
    device uchar* arena [[buffer(3)]],
    constant DeltaArguments& arguments [[buffer(4)]],
    uint2 at [[thread_position_in_grid]]) {
  const uint width = conv_width(D, arguments);
  if (at.x >= width || at.y >= arguments.segments) {
    return;
  }
  const DeltaSegment segment = segments[at.y];
  const bool reads = segment.reads != 0;
  const uint kept = arguments.tail_rows;
  // A segment that starts from zeros gets any valid address, from which nothing is read.
  const ulong begun = reads ? segment.read : writes[segment.first_write].slot;
  const device uchar* slot = slot_at<kind>(arena, begun, arguments);
  const device T* tail = tail_of<T, D>(slot, arguments);
  for (uint write = 0; write < segment.writes; ++write) {
    const DeltaWrite its = writes[segment.first_write + write];
    device T* target = const_cast<device T*>(
        tail_of<T, D>(slot_at<kind>(arena, its.slot, arguments), arguments));
    for (uint i = 0; i < kept; ++i) {  // in ascending order, a tail can be shifted in place
      const uint place = its.rows + i;
      T x = static_cast<T>(0.0f);
      if (place >= kept) {
        x = qkv[(ulong(segment.first) + place - kept) * width + at.x];
      } else if (reads) {
        x = tail[ulong(place) * width + at.x];
      }
      target[ulong(i) * width + at.x] = x;
    }
  }
}
