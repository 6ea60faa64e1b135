// Division, multiples and equal parts of sizes.
#pragma once

#include <cstdint>

namespace moe_ext {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t size, int64_t multiple) {
  return ceil_div(size, multiple) * multiple;
}

struct Part {
  int64_t begin, end;

  constexpr int64_t size() const { return end - begin; }
};

// Returns one of num_parts parts of 0 <= i < size. Their sizes differ by at most 1.
constexpr Part part_of(int64_t size, int64_t index, int64_t num_parts) {
  return {index * size / num_parts, (index + 1) * size / num_parts};
}

}  // namespace moe_ext
