// The order in which tokens compete for an expert of fixed size (App. F).
#pragma once

#include <cstdint>

#include "order.h"

namespace moe_ext::math {

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
