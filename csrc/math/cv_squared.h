// Eq. 7: CV(v)^2 = mean_i(u_i^2), where u_i = (v_i - mean(v)) / mean(v).
#pragma once

#include "elementary.h"

namespace moe_ext::math {

// The divisor of the deviations. No epsilon is needed: non-negative values have mean 0 only if all
// of them are 0.
template <typename T>
MOE_EXT_INLINE T positive(T mean) {
  return mean > T(0) ? mean : T(1);
}

// u_i.
template <typename T>
MOE_EXT_INLINE T relative_deviation(T value, T mean) {
  return (value - mean) / positive(mean);
}

// The factor of u_i - CV^2 in the gradient of n values: dCV^2/dv_i = 2 (u_i - CV^2) / (n mean). It
// is 0 if all v are 0. `grad` is the gradient of CV^2.
template <typename T>
MOE_EXT_INLINE T cv_squared_slope(T grad, T count, T mean) {
  return grad * T(2) / (positive(mean) * count);
}

}  // namespace moe_ext::math
