// Linear layers by dot products of pairs of bfloat16 (AVX512-BF16).

bool takes_pairs(const LinearShape& shape) {
  return shape.type == WeightType::bfloat16 && shape.activations != Activations::float32;
}

size_t pair_row_bytes(const LinearShape& shape) {
  return odd_lines(shape.inputs * sizeof(uint16_t));
}

// Rounds x to pairs of bfloat16. If the number of inputs is odd, the last pair ends with a zero.
void prepare_pairs(const LinearShape& shape, const float* x, size_t row, std::byte* prepared) {
  auto* const to = reinterpret_cast<uint16_t*>(prepared + row * pair_row_bytes(shape));
  to_bfloat16(x, to, shape.inputs);
  if (shape.inputs % 2 != 0) {
    to[shape.inputs] = 0;
  }
}

template <size_t P, size_t R>
[[gnu::noinline]] void multiply_pairs_block(
    const LinearShape& shape, const std::byte* w, const std::byte* x, size_t first, float* out,
    size_t out_stride) {
  const size_t pairs = (shape.inputs + 1) / 2;
  const size_t panel_bytes = shape.panel_bytes();
  const size_t x_stride = pair_row_bytes(shape);
  __m512 sums[R][P] = {};
  for (size_t pair = 0; pair < pairs; ++pair) {
    __m512bh weights[P];
    for (size_t p = 0; p < P; ++p) {
      const std::byte* const at = w + p * panel_bytes + pair * kLineBytes;
      weights[p] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(at));
      prefetch(at + kWeightsAhead);
    }
    for (size_t r = 0; r < R; ++r) {
      int32_t two;
      __builtin_memcpy(&two, x + r * x_stride + pair * sizeof(two), sizeof(two));
      const auto numbers = reinterpret_cast<__m512bh>(_mm512_set1_epi32(two));
      for (size_t p = 0; p < P; ++p) {
        sums[r][p] = _mm512_dpbf16_ps(sums[r][p], weights[p], numbers);
      }
    }
  }
  for (size_t r = 0; r < R; ++r) {
    for (size_t p = 0; p < P; ++p) {
      store_panel(shape, first + p, &sums[r][p], out + r * out_stride);
    }
  }
}

// This many sums leave enough registers for vectors of weights, and for a vector of x.
constexpr size_t kPairSums = 24;
constexpr size_t kPairRows = 12;

void multiply_pairs(const ProductCall& call, size_t first, size_t panels) {
  const size_t stride = pair_row_bytes(call.shape);
  const auto multiply = [&]<size_t P, size_t R>(size_t panel, size_t row) {
    multiply_pairs_block<P, R>(call.shape, call.panel(panel), call.x + row * stride, panel,
                               call.out + row * call.out_stride, call.out_stride);
  };
  for_blocks<kPairSums, kPairRows>(call.rows, first, panels, multiply);
}
