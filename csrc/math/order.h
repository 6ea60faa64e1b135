// The order of logits and scores that selects the top k of a token and the top m of an expert.
#pragma once

#include <bit>
#include <cstdint>

#include "elementary.h"

namespace moe_ext::math {

// Maps a number to an integer in the same order; NaN comes first, -0 equals 0. Integers and floats
// order the sign bit alike. For negative floats the order of the other bits is reversed.
MOE_EXT_INLINE int32_t order_key(float number) {
  const int32_t bits = std::bit_cast<int32_t>(number + 0.0f);
  return number == number ? bits ^ ((bits >> 31) & INT32_MAX) : INT32_MIN;
}

MOE_EXT_INLINE int64_t order_key(double number) {
  const int64_t bits = std::bit_cast<int64_t>(number + 0.0);
  return number == number ? bits ^ ((bits >> 63) & INT64_MAX) : INT64_MIN;
}

// The inverse of order_key: the same bit operation. The key of NaN gives a NaN.
MOE_EXT_INLINE float number_of_key(int32_t key) {
  return std::bit_cast<float>(key ^ ((key >> 31) & INT32_MAX));
}

MOE_EXT_INLINE double number_of_key(int64_t key) {
  return std::bit_cast<double>(key ^ ((key >> 63) & INT64_MAX));
}

}  // namespace moe_ext::math
