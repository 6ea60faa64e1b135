// The order in which tokens compete for an expert of fixed size (App. F).
#pragma once

#include <bit>
#include <cstdint>

#include "elementary.h"

namespace moe_ext::math {

// An integer in the order of the scores: NaN below every number, -0 equal to 0. The sign bit of an
// integer orders as that of a float does, the other bits of a negative float the other way round.
MOE_EXT_INLINE int32_t order_key(float score) {
  const int32_t bits = std::bit_cast<int32_t>(score + 0.0f);
  return score == score ? bits ^ ((bits >> 31) & INT32_MAX) : INT32_MIN;
}

MOE_EXT_INLINE int64_t order_key(double score) {
  const int64_t bits = std::bit_cast<int64_t>(score + 0.0);
  return score == score ? bits ^ ((bits >> 63) & INT64_MAX) : INT64_MIN;
}

// The score of a key: the same swap, which takes the key of NaN to a NaN.
MOE_EXT_INLINE float score_of_key(int32_t key) {
  return std::bit_cast<float>(key ^ ((key >> 31) & INT32_MAX));
}

MOE_EXT_INLINE double score_of_key(int64_t key) {
  return std::bit_cast<double>(key ^ ((key >> 63) & INT64_MAX));
}

// Among equal scores of an expert (a column) the tokens (rows) with the larger of these win, then
// the lower row. At the symmetric start, where all scores are equal, every expert so gets tokens of
// its own: a pseudo-random choice, the same on every device and in every run. In [0, 2^30).
MOE_EXT_INLINE int32_t tie_break(uint32_t column, uint32_t row) {
  uint32_t hash = column * 0x9e3779b9u + row;  // 2^32 / golden ratio keeps the columns' rows apart
  hash = (hash ^ (hash >> 16)) * 0x7feb352du;
  hash = (hash ^ (hash >> 15)) * 0x846ca68bu;
  return static_cast<int32_t>((hash ^ (hash >> 16)) >> 2);
}

}  // namespace moe_ext::math
