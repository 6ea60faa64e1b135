// The standard normal distribution: Phi and its density.
#pragma once

#include "elementary.h"

namespace moe_ext::math {

// e^(-z^2 / 2), with a correction for the rounding error of z^2: accurate to a few ulp. Returns 0
// for |z| > 12.5, where the value is below 1.2e-34, so products with gradients do not become
// subnormal.
MOE_EXT_INLINE float exp_minus_half_square(float z) {
  constexpr float kLargest = 12.5f;
  const float magnitude = z < 0.0f ? -z : z;
  const float x = magnitude > kLargest ? kLargest : magnitude;
  const float square = x * x;
  const float square_error = std::fma(x, x, -square);
  const float value = exp(-0.5f * square);
  return magnitude > kLargest ? 0.0f : std::fma(value, -0.5f * square_error, value);
}

MOE_EXT_INLINE double exp_minus_half_square(double z) { return std::exp(-0.5 * z * z); }

// phi(z)
template <typename T>
MOE_EXT_INLINE T normal_density(T z) {
  return exp_minus_half_square(z) * T(0.39894228040143267794);  // 1 / sqrt(2 pi)
}

// Phi(z) by erfc, which keeps the relative accuracy of the lower tail. With x = |z| / sqrt(2),
// erfc(x) = e^(-x^2) p(t) / (1 + 2x), where t = (x - 5/2) / (x + 5/2) and p is the minimax
// polynomial on [0, 11].
MOE_EXT_INLINE float normal_cdf(float z) {
  float x = (z < 0.0f ? -z : z) * 0.707106781f;
  x = x > 11.0f ? 11.0f : x;
  const float x_plus = x + 2.5f;
  const float slope = std::fma(2.0f, x, 1.0f);
  const float reciprocal = 1.0f / (x_plus * slope);
  const float t = (x - 2.5f) * (slope * reciprocal);
  float p = 4.74045991e-4f;
  p = std::fma(p, t, 3.62610134e-4f);
  p = std::fma(p, t, -4.28950575e-3f);
  p = std::fma(p, t, 9.99580821e-4f);
  p = std::fma(p, t, 3.27344444e-2f);
  p = std::fma(p, t, -1.02981390e-1f);
  p = std::fma(p, t, 1.57633422e-1f);
  p = std::fma(p, t, -9.90235068e-2f);
  p = std::fma(p, t, -1.22356909e-1f);
  p = std::fma(p, t, 1.26483817f);
  const float tail = 0.5f * exp_minus_half_square(z) * (p * (x_plus * reciprocal));
  return z < 0.0f ? tail : 1.0f - tail;
}

MOE_EXT_INLINE double normal_cdf(double z) { return 0.5 * std::erfc(z * -0.70710678118654752440); }

}  // namespace moe_ext::math
