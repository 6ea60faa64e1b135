// weighted_cv_squared: the checks of its arguments, and its outputs.
#pragma once

#include <vector>

#include "checks.h"

namespace moe_ext {

inline void check_weighted_cv_squared(const char* op, at::TensorList values,
                                      at::ArrayRef<double> weights) {
  TORCH_CHECK_VALUE(!values.empty() && values.size() == weights.size(), op,
                    ": weights must have one number for each of 1 or more values, got ",
                    weights.size(), " for ", values.size());
  for (const Tensor& each : values) {
    check_device(op, "values", each, values[0]);
    check_dim(op, "values", each, 1);
    check_floating(op, "values", each);
    check_type(op, "values", each, values[0].scalar_type());
    TORCH_CHECK_VALUE(each.sym_size(0) > 0, op, ": values must have at least 1 element, got 0");
  }
}

// Creates the scalar result.
inline Tensor weighted_cv_squared_output(Empty& empty, at::TensorList values) {
  return empty(values[0], {}, accumulate_type(values[0]));
}

inline void check_weighted_cv_squared_backward(const Tensor& grad, at::TensorList values,
                                               at::ArrayRef<double> weights) {
  constexpr auto op = "_weighted_cv_squared_backward";
  check_weighted_cv_squared(op, values, weights);
  check_argument(op, "grad", grad, values[0], accumulate_type(values[0]), {});
}

// Creates the gradients of the values.
inline std::vector<Tensor> weighted_cv_squared_gradients(Empty& empty, at::TensorList values) {
  std::vector<Tensor> gradients;
  for (const Tensor& each : values) gradients.push_back(empty_of(empty, each));
  return gradients;
}

}  // namespace moe_ext
