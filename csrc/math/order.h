// The order of logits and scores, by which the top k of a token and the top m of an expert are
// chosen.
#pragma once

#include <bit>
#include <cstdint>

#include "elementary.h"

namespace moe_ext::math {

// An integer in the order of the numbers: NaN below every one, -0 equal to 0. The sign bit of an
// integer orders as that of a float does, the other bits of a negative float the other way round.
MOE_EXT_INLINE int32_t order_key(float number) {
  const int32_t bits = std::bit_cast<int32_t>(number + 0.0f);
  return number == number ? bits ^ ((bits >> 31) & INT32_MAX) : INT32_MIN;
}

MOE_EXT_INLINE int64_t order_key(double number) {
  const int64_t bits = std::bit_cast<int64_t>(number + 0.0);
  return number == number ? bits ^ ((bits >> 63) & INT64_MAX) : INT64_MIN;
}

// The number of a key: the same swap, which takes the key of NaN to a NaN.
MOE_EXT_INLINE float number_of_key(int32_t key) {
  return std::bit_cast<float>(key ^ ((key >> 31) & INT32_MAX));
}

MOE_EXT_INLINE double number_of_key(int64_t key) {
  return std::bit_cast<double>(key ^ ((key >> 63) & INT64_MAX));
}

}  // namespace moe_ext::math
