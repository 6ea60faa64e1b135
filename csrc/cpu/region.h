// A rectangle of consecutive rows and columns of a matrix, such as a tile.
#pragma once

#include <cstdint>

namespace moe_ext::cpu {

struct Region {
  int64_t row, num_rows;
  int64_t column, num_columns;
};

}  // namespace moe_ext::cpu
