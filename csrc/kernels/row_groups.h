// Groups of consecutive rows.
#pragma once

#include "../math/elementary.h"
#include "types.h"

namespace moe_ext {

// The groups lie between two bounds each, or have equal sizes.
struct RowGroups {
  const int64_t* bounds;  // [G + 1], or null: R / G rows each
  int64_t num_groups;     // G
  int64_t num_rows;       // R

  MOE_EXT_INLINE int64_t begin(int64_t group) const {
    return bounds ? bounds[group] : group * (num_rows / num_groups);
  }
  MOE_EXT_INLINE int64_t end(int64_t group) const {
    return group + 1 < num_groups ? begin(group + 1) : num_rows;
  }
  // Returns the group of a row: the last group that begins at or before the row.
  MOE_EXT_INLINE int64_t group_of(int64_t row) const {
    if (bounds == nullptr) return row / (num_rows / num_groups);
    int64_t low = 0, high = num_groups - 1;
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      if (begin(middle) <= row) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

}  // namespace moe_ext
