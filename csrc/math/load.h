// Eqs. 8 and 9: P(x, i) = Phi((clean_i - threshold_i) / stddev_i), and its derivative.
#pragma once

#include "normal.h"

namespace moe_ext::math {

// The lower bound of the standard deviation. Without noise, P would be a step function: 0/0 at a
// tie.
template <typename T>
constexpr T kLeastNoise = T(1e-6);

template <typename T>
MOE_EXT_INLINE T at_least_some_noise(T stddev) {
  return stddev < kLeastNoise<T> ? kLeastNoise<T> : stddev;
}

// A threshold of -infinity (k = E, every expert is chosen) gives exactly 1.
template <typename T>
MOE_EXT_INLINE T prob_in_top_k(T clean, T threshold, T stddev) {
  return normal_cdf((clean - threshold) / at_least_some_noise(stddev));
}

// dP/dclean = q = phi(z) / stddev;  dP/dthreshold = -q;  dP/dstddev = -q z, or 0 where stddev <
// kLeastNoise.
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
  // If the density underflows, z may be infinite. The limit of q z is 0; 0 * infinity would be NaN.
  return {q, q == T(0) || stddev < kLeastNoise<T> ? T(0) : -q * z};
}

}  // namespace moe_ext::math
