// Division and multiples of sizes.
#pragma once

#include <cstdint>

namespace moe_ext {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t size, int64_t multiple) {
  return ceil_div(size, multiple) * multiple;
}

}  // namespace moe_ext
