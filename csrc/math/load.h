// P(x, i) = Phi((clean_i - threshold_i) / stddev_i), App. A, and its derivative.
#pragma once

#include "normal.h"

namespace moe_ext::math {

// Without noise P would be a step, with 0/0 at a tie and in its derivative.
template <typename T>
constexpr T kLeastNoise = T(1e-6);

template <typename T>
MOE_EXT_INLINE T at_least_some_noise(T stddev) {
  return stddev < kLeastNoise<T> ? kLeastNoise<T> : stddev;
}

// A threshold of -infinity (k = E: nothing to exceed) gives exactly 1.
template <typename T>
MOE_EXT_INLINE T prob_in_top_k(T clean, T threshold, T stddev) {
  return normal_cdf((clean - threshold) / at_least_some_noise(stddev));
}

// dP/dclean = q = phi(z) / stddev;  dP/dstddev = -q z, 0 below the least;  dP/dthreshold = -q.
template <typename T>
struct ProbGradient {
  T clean;
  T stddev;
};

template <typename T>
MOE_EXT_INLINE ProbGradient<T> prob_in_top_k_gradient(T clean, T threshold, T stddev, T grad) {
  const T noise = at_least_some_noise(stddev);
  const T z = (clean - threshold) / noise;
  const T q = grad * normal_density(z) / noise;
  // Where the density underflows z may be infinite: the limit of q z is 0, not 0 * infinity.
  return {q, q == T(0) || stddev < kLeastNoise<T> ? T(0) : -q * z};
}

}  // namespace moe_ext::math
