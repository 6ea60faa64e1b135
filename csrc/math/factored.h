// App. D: the second moment of a matrix of gradients, factored into row and column moments.
//
// V = row column^T / mean(row), with bias correction; the step is -lr g / D, where D = sqrt(V) +
// eps. The square roots of the factors are taken separately: a product of two second moments could
// underflow.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "elementary.h"

namespace moe_ext::math {

// The largest numbers of a matrix whose squares, second moments and their sums cannot overflow.
template <typename T>
struct Range {
  T gradient, moment;

  MOE_EXT_INLINE Range(int64_t num_rows, int64_t num_columns, T correction)
      : gradient(std::sqrt(kMax / static_cast<T>(num_rows * num_columns))),
        moment(kMax / (T(2 * num_rows) * (correction > T(1) ? correction : T(1)))) {}

  // Returns a gradient, or 0 if it is finite but too large: like that of Adam, whose second moment
  // would be infinite, its weight keeps its value. Infinity and NaN reach the weight.
  MOE_EXT_INLINE T usable(T grad) const {
    const T magnitude = grad < T(0) ? -grad : grad;
    return magnitude > gradient && magnitude <= kMax ? T(0) : grad;
  }

 private:
  static constexpr T kMax = std::numeric_limits<T>::max();
};

// decay v + gain mean(g^2), at most `most`, and 0 where the result would be subnormal. The moment
// of an expert without rows keeps decaying, and a subnormal costs a CPU about a hundred cycles.
template <typename T>
MOE_EXT_INLINE T second_moment(T v, T mean_square, T decay, T gain, T most) {
  const T next = decay * v + gain * mean_square;
  if (next > most) return most;
  return next < std::numeric_limits<T>::min() ? T(0) : next;
}

// sqrt(V_ij correction) = row_root_i column_root_j. If all moments are 0, V is 0 as well.
template <typename T>
MOE_EXT_INLINE T row_root(T row, T mean, T correction) {
  return mean == T(0) ? T(0) : std::sqrt(row / mean * correction);
}

template <typename T>
MOE_EXT_INLINE T column_root(T column) {
  return std::sqrt(column);
}

// The variant that averages the roots: D = root_i root_j / mean(root_j), with eps added to each
// root.
template <typename T>
MOE_EXT_INLINE T root_with_eps(T average, T correction, T eps) {
  return std::sqrt(average * correction) + eps;
}

template <typename T>
MOE_EXT_INLINE T stepped(T param, T grad, T lr, T denominator) {
  return param - lr * grad / denominator;
}

}  // namespace moe_ext::math
