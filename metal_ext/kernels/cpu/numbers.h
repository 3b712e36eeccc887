// Numbers as callers hold them and as the kernels do: bfloat16 and float32, natural and kernel
// order. Included inside an instruction set's namespace, as simd.h is.

template <class Body>
void with_type(KVType type, const Body& body) {
  if (type == KVType::bfloat16) {
    body(uint16_t{});
  } else {
    body(float{});
  }
}

void to_bfloat16(const float* source, uint16_t* target, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, source + i, sizeof(bits));
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    target[i] = static_cast<uint16_t>(nan ? 0x7fc0u : rounded);
  }
}

void from_bfloat16(const uint16_t* source, float* target, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(source[i]) << 16;
    __builtin_memcpy(target + i, &bits, sizeof(bits));
  }
}

void prepare_queries(const HeadShape& shape, const float* queries, float scale, float* target) {
  with_type(shape.type, [&]<class KV>(KV) {
    for (size_t head = 0; head < shape.query_heads; ++head) {
      const float* from = queries + head * shape.head_dim;
      float* to = target + head * shape.head_dim;
      for (size_t i = 0; i < shape.head_dim; ++i) {
        to[kernel_order<KV>(i)] = from[i] * scale;
      }
    }
  });
}

// The lower or the upper halves of a and b, one lane of each in turn.
template <bool upper, int... lane>
inline Vec zip(Vec a, Vec b, std::integer_sequence<int, lane...>) {
  constexpr int n = static_cast<int>(kLanes);
  return pick<(lane / 2 + lane % 2 * n + upper * n / 2)...>(a, b);
}

// out = values / weight, in natural order.
inline void divide(
    KVType type, const float* values, float weight, size_t head_dim, float* out) {
  for (size_t i = 0; i < head_dim; i += 2 * kLanes) {
    const Vec first = load(values + i) / all(weight);
    const Vec second = load(values + i + kLanes) / all(weight);
    const bool pairs = type == KVType::bfloat16;
    store(out + i, pairs ? zip<false>(first, second, Lanes{}) : first);
    store(out + i + kLanes, pairs ? zip<true>(first, second, Lanes{}) : second);
  }
}
