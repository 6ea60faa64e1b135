// P(x, i) = Phi((clean_i - threshold_i) / stddev_i), App. A, and its derivative.
#pragma once

#include "normal.h"

namespace moe_ext::math {

// A threshold of -infinity (k = E: nothing to exceed) gives exactly 1.
template <typename T>
MOE_EXT_INLINE T prob_in_top_k(T clean, T threshold, T stddev) {
  return normal_cdf((clean - threshold) / stddev);
}

// dP/dclean = q = phi(z) / stddev;  dP/dstddev = -q z;  dP/dthreshold = -q.
template <typename T>
struct ProbGradient {
  T clean;
  T stddev;
};

template <typename T>
MOE_EXT_INLINE ProbGradient<T> prob_in_top_k_gradient(T clean, T threshold, T stddev, T grad) {
  const T z = (clean - threshold) / stddev;
  const T q = grad * normal_density(z) / stddev;
  // Where the density underflows z may be infinite: the limit of q z is 0, not 0 * infinity.
  return {q, q == T(0) ? T(0) : -q * z};
}

}  // namespace moe_ext::math
