// Some rows and columns of a matrix, all of one tile of a product, say.
#pragma once

#include <cstdint>

namespace moe_ext::cpu {

struct Region {
  int64_t row, num_rows;
  int64_t column, num_columns;
};

}  // namespace moe_ext::cpu
