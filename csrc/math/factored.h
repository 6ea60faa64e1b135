// App. D: the second moment of a matrix of gradients, factored into the averages of its rows and of
// its columns.
//
// V = row column^T / mean(row), each average corrected for its bias; the step is -lr g / D with
// D = sqrt(V) + eps. The roots of the factors are taken apart: no product of two averages, which
// are squares already, is formed where it could underflow.
#pragma once

#include <cmath>
#include <limits>

#include "elementary.h"

namespace moe_ext::math {

// decay v + gain mean(g^2), and 0 where that would be subnormal: the average of an expert without
// rows decays for ever, and a processor takes a hundred cycles for each subnormal number.
template <typename T>
MOE_EXT_INLINE T second_moment(T v, T mean_square, T decay, T gain) {
  const T next = decay * v + gain * mean_square;
  return next < std::numeric_limits<T>::min() ? T(0) : next;
}

// sqrt(V_ij correction) = row_root_i column_root_j. Where all averages are 0, so is V.
template <typename T>
MOE_EXT_INLINE T row_root(T row, T mean, T correction) {
  return mean == T(0) ? T(0) : std::sqrt(row / mean * correction);
}

template <typename T>
MOE_EXT_INLINE T column_root(T column) {
  return std::sqrt(column);
}

// The variant with the mean of the roots: D = root_i root_j / mean(root_j), each with its eps.
template <typename T>
MOE_EXT_INLINE T root_with_eps(T average, T correction, T eps) {
  return std::sqrt(average * correction) + eps;
}

template <typename T>
MOE_EXT_INLINE T stepped(T param, T grad, T lr, T denominator) {
  return param - lr * grad / denominator;
}

}  // namespace moe_ext::math
