// softplus(x) = log(1 + e^x), which turns x W_noise into a standard deviation (Eq. 4), and its
// derivative.
#pragma once

#include "elementary.h"

namespace moe_ext::math {

template <typename T>
MOE_EXT_INLINE T softplus(T x) {
  const T magnitude = x < T(0) ? -x : x;
  return (x < T(0) ? T(0) : x) + log1p_unit(exp(-magnitude));
}

// softplus'(x) = 1 / (1 + e^-x)
template <typename T>
MOE_EXT_INLINE T softplus_derivative(T x) {
  const T decay = exp(x < T(0) ? x : -x);
  return (x < T(0) ? decay : T(1)) / (T(1) + decay);
}

}  // namespace moe_ext::math
