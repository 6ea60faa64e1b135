// exp, log1p and the logistic function for float and double, on host and device.
//
// The float versions have no branches, so loops over them vectorize. Every rounding is explicit:
// std::fma marks each product that is not rounded. Compiled without contraction, the results are
// bitwise identical on every instruction set and on the GPU. The double versions call the C
// library.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define MOE_EXT_INLINE __host__ __device__ __forceinline__
#else
#define MOE_EXT_INLINE inline __attribute__((always_inline))
#endif

namespace moe_ext::math {

// e^x with a relative error below 1e-7; overflows to infinity. Returns 0 where the result would be
// subnormal: a subnormal costs a CPU about a hundred cycles and makes no difference here.
MOE_EXT_INLINE float exp(float argument) {
  constexpr float kSmallest = -87.3365f;                  // log of the smallest normal number
  float x = argument < kSmallest ? kSmallest : argument;  // in this form NaN stays NaN
  x = x > 89.0f ? 89.0f : x;
  // x = n ln 2 + r with |r| <= ln 2 / 2; adding and subtracting 1.5 * 2^23 rounds to an integer.
  const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  float r = std::fma(n, -0.693359375f, x);
  r = std::fma(n, 2.12194440e-4f, r);
  float tail = 1.39261761e-3f;
  tail = std::fma(tail, r, 8.36317307e-3f);
  tail = std::fma(tail, r, 4.16665547e-2f);
  tail = std::fma(tail, r, 1.66665770e-1f);
  tail = std::fma(tail, r, 0.5f);
  const float exp_r = std::fma(tail, r * r, r) + 1.0f;
  // 2^n as two factors, because n reaches 128.
  const int32_t exponent = static_cast<int32_t>(n == n ? n : 0.0f);  // NaN has no integer value
  const int32_t half = exponent >> 1;
  const float value = exp_r * std::bit_cast<float>((half + 127) << 23) *
                      std::bit_cast<float>((exponent - half + 127) << 23);
  return argument < kSmallest ? 0.0f : value;
}

MOE_EXT_INLINE double exp(double x) { return std::exp(x); }

// log(1 + u) for 0 <= u <= 1, as 2 atanh(u / (2 + u)); relative error below 2e-7.
MOE_EXT_INLINE float log1p_unit(float u) {
  const float s = u / (2.0f + u);
  const float w = s * s;
  float series = 1.40788892e-1f;
  series = std::fma(series, w, 1.39825789e-1f);
  series = std::fma(series, w, 2.00122976e-1f);
  series = std::fma(series, w, 3.33331608e-1f);
  series = std::fma(series, w, 1.0f);
  return 2.0f * s * series;
}

MOE_EXT_INLINE double log1p_unit(double u) { return std::log1p(u); }

// 1 / (1 + e^-x), without overflow for large |x|.
template <typename T>
MOE_EXT_INLINE T sigmoid(T x) {
  const T decay = exp(x < T(0) ? x : -x);  // at most 1
  return (x < T(0) ? decay : T(1)) / (T(1) + decay);
}

}  // namespace moe_ext::math
