// softplus(x) = log(1 + e^x), which turns x W_noise into a standard deviation (Eq. 4). Its
// derivative is the logistic function.
#pragma once

#include "elementary.h"

namespace moe_ext::math {

template <typename T>
MOE_EXT_INLINE T softplus(T x) {
  const T magnitude = x < T(0) ? -x : x;
  return (x < T(0) ? T(0) : x) + log1p_unit(exp(-magnitude));
}

}  // namespace moe_ext::math
