// Scores of the logits, gates of the chosen experts, and their gradients.
//
// A gate is scale * w_j / denominator, where w_j = value(l_j, shift) is the score of the logit l_j
// up to a common factor. Only the softmax has a shift and a factor; its denominator is a sum of w.
#pragma once

#include <string_view>

#include "elementary.h"
#include "softplus.h"

namespace moe_ext::math {

// e^l / sum_j e^l_j; the largest logit is the shift.
struct SoftmaxScore {
  static constexpr bool kSoftmax = true;
  template <typename T>
  static MOE_EXT_INLINE T value(T logit, T shift) {
    return exp(logit - shift);
  }
  template <typename T>
  static MOE_EXT_INLINE T slope(T, T value) {
    return value;
  }
};

// 1 / (1 + e^-l), DeepSeek-V3 (arXiv 2412.19437, Eq. 15)
struct SigmoidScore {
  static constexpr bool kSoftmax = false;
  template <typename T>
  static MOE_EXT_INLINE T value(T logit, T) {
    return sigmoid(logit);
  }
  template <typename T>
  static MOE_EXT_INLINE T slope(T logit, T value) {
    return value * sigmoid(-logit);
  }
};

// sqrt(log(1 + e^l)); the derivative is sigmoid(l) / (2 value), or 0 where the value underflows.
struct SqrtSoftplusScore {
  static constexpr bool kSoftmax = false;
  template <typename T>
  static MOE_EXT_INLINE T value(T logit, T) {
    return std::sqrt(softplus(logit));
  }
  template <typename T>
  static MOE_EXT_INLINE T slope(T logit, T value) {
    return value == T(0) ? T(0) : sigmoid(logit) / (T(2) * value);
  }
};

// Calls body(name, score) for every score function.
template <typename Body>
void for_each_score(const Body& body) {
  body("softmax", SoftmaxScore());
  body("sigmoid", SigmoidScore());
  body("sqrt_softplus", SqrtSoftplusScore());
}

// Calls body with the score function of this name.
template <typename Body>
void with_score(std::string_view name, const Body& body) {
  for_each_score([&](std::string_view known, auto score) {
    if (known == name) body(score);
  });
}

// The denominator of renormalized gates. Scores that all underflow give gates of 0, not 0 / 0; a
// softmax has no such case.
template <typename Score, typename T>
MOE_EXT_INLINE T renormalizer(T sum) {
  return Score::kSoftmax ? sum : sum + T(1e-20);
}

// dL/dl_a = (v_a - sum_j g_j v_j) slope_a / denominator, with g_j = w_j / denominator and the
// gradient v_j of g_j. The mean, which is the sum over j, is 0 if the denominator is a constant.
template <typename T>
MOE_EXT_INLINE T score_gradient(T grad, T mean, T slope, T denominator) {
  return (grad - mean) * (slope / denominator);
}

}  // namespace moe_ext::math
