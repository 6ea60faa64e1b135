// cv_squared: the checks of its argument, and its output.
#pragma once

#include "checks.h"

namespace moe_ext {

inline void check_cv_squared(const Tensor& values) {
  constexpr auto op = "cv_squared";
  check_dim(op, "values", values, 1);
  check_floating(op, "values", values);
  TORCH_CHECK_VALUE(values.sym_size(0) > 0, op, ": values must have at least 1 element, got 0");
}

// Creates the scalar result.
inline Tensor cv_squared_output(Empty& empty, const Tensor& values) {
  return empty(values, {}, accumulate_type(values));
}

}  // namespace moe_ext
