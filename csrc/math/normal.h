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

MOE_EXT_INLINE double exp_minus_half_square(double z) {
  constexpr double kLargest = 40.0;  // the value is 0
  const double magnitude = z < 0.0 ? -z : z;
  const double x = magnitude > kLargest ? kLargest : magnitude;
  const double square = x * x;
  const double square_error = std::fma(x, x, -square);
  const double value = exp(-0.5 * square);
  return std::fma(value, -0.5 * square_error, value);
}

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

// The same with t = (x - 4) / (x + 4), and p on [0, 28] with a relative error of 2e-18. std::erfc
// rounds differently on different processors.
MOE_EXT_INLINE double normal_cdf(double z) {
  double x = (z < 0.0 ? -z : z) * 0.70710678118654752440;
  x = x > 28.0 ? 28.0 : x;
  const double x_plus = x + 4.0;
  const double slope = std::fma(2.0, x, 1.0);
  const double reciprocal = 1.0 / (x_plus * slope);
  const double t = (x - 4.0) * (slope * reciprocal);
  double p = 1.26378285804213698e-9;
  p = std::fma(p, t, 1.86848738547351898e-9);
  p = std::fma(p, t, -1.40919828225557554e-8);
  p = std::fma(p, t, -1.79994754590314207e-8);
  p = std::fma(p, t, 1.10059961986400570e-7);
  p = std::fma(p, t, 7.47195278050097119e-8);
  p = std::fma(p, t, -8.25469974487116158e-7);
  p = std::fma(p, t, 2.93778549434437857e-7);
  p = std::fma(p, t, 5.70978476096650582e-6);
  p = std::fma(p, t, -1.12220463166690046e-5);
  p = std::fma(p, t, -2.43992442831298789e-5);
  p = std::fma(p, t, 1.50621697046783554e-4);
  p = std::fma(p, t, -1.99256684323891530e-4);
  p = std::fma(p, t, -7.57773297366914618e-4);
  p = std::fma(p, t, 5.03196997575317603e-3);
  p = std::fma(p, t, -1.61977340559944886e-2);
  p = std::fma(p, t, 3.71675155377702571e-2);
  p = std::fma(p, t, -6.63303658124095030e-2);
  p = std::fma(p, t, 9.37328349983302250e-2);
  p = std::fma(p, t, -1.01039066036294589e-1);
  p = std::fma(p, t, 6.80970542546932289e-2);
  p = std::fma(p, t, 1.53796521026195575e-2);
  p = std::fma(p, t, -1.39621116840562526e-1);
  p = std::fma(p, t, 1.23299511862555256);
  const double tail = 0.5 * exp_minus_half_square(z) * (p * (x_plus * reciprocal));
  return z < 0.0 ? tail : 1.0 - tail;
}

}  // namespace moe_ext::math
