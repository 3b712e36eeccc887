// Softmax over keys that arrive a few at a time (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018).

constexpr float kNoScore = -1e30f;  // below every score, but finite: differences stay numbers
constexpr float kHidden = -__builtin_inff();  // has weight 0 for any highest score

inline void start(Partial& state, size_t heads, size_t head_dim) {
  for (size_t h = 0; h < heads; ++h) {
    state.highest[h] = kNoScore;
    state.weight[h] = 0.0f;
  }
  for (size_t i = 0; i < heads * head_dim; ++i) {
    state.values[i] = 0.0f;
  }
}

// Replaces `count` scores, whole vectors, by softcap * tanh(score / softcap), unless it is 0.
inline void cap_scores(float* scores, size_t count, float softcap) {
  for (size_t t = 0; softcap != 0.0f && t < count; t += kLanes) {
    store(scores + t, all(softcap) * tanh_of(load(scores + t) / all(softcap)));
  }
}

// Does one step of the softmax: replaces scores [skip, n) by weights, and those before them by 0.
// Updates the row's highest score and sum of weights. Returns the factor by which earlier sums of
// values must be multiplied. A weight's lane follows from its position, whatever is skipped.
inline float soften(
    float* scores, size_t skip, size_t n, float softcap, float& highest, float& weight) {
  Vec best = all(highest);
  const size_t end = (n + kLanes - 1) / kLanes * kLanes;
  cap_scores(scores, end, softcap);
  for (size_t t = 0; t < skip; ++t) {
    scores[t] = kHidden;
  }
  for (size_t t = n; t < end; ++t) {
    scores[t] = kHidden;
  }
  for (size_t t = 0; t < end; t += kLanes) {
    best = larger(load(scores + t), best);
  }
  const float raised = largest_of(best);
  Vec total{};
  for (size_t t = 0; t < end; t += kLanes) {
    const Vec w = exp_of_negative(load(scores + t) - all(raised));
    store(scores + t, w);
    total += w;
  }
  const float factor = exp_of_negative(all(highest - raised))[0];
  weight = weight * factor + sum_of(total);
  highest = raised;
  return factor;
}

// Combines a second partial result (`more_...`) of a head with the first, which gets the result.
inline void join(
    float& highest, float& weight, float* values, float more_highest, float more_weight,
    const float* more_values, size_t head_dim) {
  const float raised = highest > more_highest ? highest : more_highest;
  const float keep = exp_of_negative(all(highest - raised))[0];
  const float take = exp_of_negative(all(more_highest - raised))[0];
  for (size_t i = 0; i < head_dim; i += kLanes) {
    store(values + i, fma(load(values + i), all(keep), load(more_values + i) * all(take)));
  }
  weight = weight * keep + more_weight * take;
  highest = raised;
}

// Returns the sum of weights with that of the head's sink, if it has one.
inline float with_sink(const float* sinks, size_t head, float highest, float weight) {
  if (sinks == nullptr) {
    return weight;
  }
  const float raised = highest > sinks[head] ? highest : sinks[head];
  const Vec own = exp_of_negative(all(sinks[head] - raised));
  return weight + own[0] / exp_of_negative(all(highest - raised))[0];
}

// Combines the partial results of one row over parts of its keys, in order.
void finish(
    const HeadShape& shape, const float* sinks, const float* partials, size_t count, float* out) {
  const size_t size = Partial::floats(shape.query_heads, shape.head_dim);
  float joined[kMaxHeadDim];
  for (size_t head = 0; head < shape.query_heads; ++head) {
    float highest = kNoScore;
    float weight = 0.0f;
    for (size_t i = 0; i < shape.head_dim; ++i) {
      joined[i] = 0.0f;
    }
    for (size_t p = 0; p < count; ++p) {
      const Partial part =
          Partial::at(const_cast<float*>(partials) + p * size, shape.query_heads);
      join(highest, weight, joined, part.highest[head], part.weight[head],
           part.values + head * shape.head_dim, shape.head_dim);
    }
    divide(shape.type, joined, with_sink(sinks, head, highest, weight), shape.head_dim,
           out + head * shape.head_dim);
  }
}
