// How ties are broken when tokens compete for an expert of fixed batch size (App. F).
#pragma once

#include <cstdint>

#include "order.h"

namespace moe_ext::math {

// A hash in [0, 2^30). Among equal scores of an expert (column), the token (row) with the larger
// hash wins, then the lower row. With identical scores, as at initialization, each expert thus
// selects different tokens. The result is identical on every device and in every run.
MOE_EXT_INLINE int32_t tie_break(uint32_t column, uint32_t row) {
  uint32_t hash = column * 0x9e3779b9u + row;  // 2^32 / golden ratio separates the columns
  hash = (hash ^ (hash >> 16)) * 0x7feb352du;
  hash = (hash ^ (hash >> 15)) * 0x846ca68bu;
  return static_cast<int32_t>((hash ^ (hash >> 16)) >> 2);
}

}  // namespace moe_ext::math
