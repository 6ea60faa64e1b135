// The cross-entropy of a row of logits l with the target y, over V classes, and its derivative:
//
//   loss = lse - (1 - eps) l_y - eps mean(l) + z lse^2,   lse = ln sum_v e^l_v
//
// eps is label_smoothing, z is z_loss. A logit is l = softcap(x) = c tanh(x / c) of a product x, or
// x itself.
#pragma once

#include <cmath>

#include "activation.h"
#include "elementary.h"

namespace moe_ext::math {

// c tanh(x / c); its derivative is 1 - (l / c)^2, where l is the result.
template <typename T>
struct Softcap {
  T cap;  // c, above 0

  MOE_EXT_INLINE T value(T x) const { return cap * tanh(x / cap); }
  MOE_EXT_INLINE T slope(T logit) const {
    const T t = logit / cap;
    return std::fma(-t, t, T(1));
  }
};

// The loss of a row. `sum` is the sum of e^(l_v - shift), so lse = shift + ln(sum). Differences
// from the shift are exact for large logits; lse is not.
template <typename T>
struct CrossEntropy {
  T smoothing, z_loss;

  MOE_EXT_INLINE T loss(T shift, T log_sum, T target_logit, T mean_logit) const {
    T loss = (T(1) - smoothing) * (shift - target_logit) + log_sum;
    if (smoothing != T(0)) loss += smoothing * (shift - mean_logit);
    const T lse = shift + log_sum;
    return z_loss == T(0) ? loss : loss + z_loss * lse * lse;
  }
};

// dL/dl_v = softmax p_v - uniform - [v = y] target, where p_v = e^(l_v - lse):
//   softmax = g (1 + 2 z lse),   uniform = g eps / V,   target = g (1 - eps),   g = dL/dloss
//
// All are 0 if g is 0, as for an ignored token, even if lse is not finite.
template <typename T>
struct LogitGradient {
  T lse, softmax, uniform, target;

  MOE_EXT_INLINE LogitGradient(const CrossEntropy<T>& of, T lse, T grad, T num_classes)
      : lse(lse),
        softmax(grad == T(0) ? T(0) : grad * (T(1) + T(2) * of.z_loss * lse)),
        uniform(grad * of.smoothing / num_classes),
        target(grad * (T(1) - of.smoothing)) {}

  MOE_EXT_INLINE bool is_zero() const {
    return softmax == T(0) && uniform == T(0) && target == T(0);
  }

  // The gradient of a logit that is not the target's.
  MOE_EXT_INLINE T other(T logit) const { return std::fma(softmax, exp(logit - lse), -uniform); }
};

}  // namespace moe_ext::math
