// Eq. 7: CV(v)^2 = mean_i(u_i^2), where u_i = (v_i - mean(v)) / mean(v).
#pragma once

#include "elementary.h"

namespace moe_ext::math {

// u_i. No epsilon is needed: non-negative values have mean 0 only if all of them are 0.
template <typename T>
MOE_EXT_INLINE T relative_deviation(T value, T mean) {
  return (value - mean) / (mean > T(0) ? mean : T(1));
}

}  // namespace moe_ext::math
