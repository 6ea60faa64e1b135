// weighted_cv_squared: the host functions.
#pragma once

#include <vector>

#include "checks.h"
#include "device.h"
#include "kernels/cv_squared.h"

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

// Returns the scalar sum_j weights_j CV(values_j)^2.
template <typename Device>
Tensor weighted_cv_squared(at::TensorList values, at::ArrayRef<double> weights) {
  check_weighted_cv_squared("weighted_cv_squared", values, weights);
  Tensor result = Device::empty(values[0], {}, accumulate_type(values[0]));
  Device::compute(values[0], [&] {
    with_type(values[0], [&]<typename scalar_t>() {
      for (size_t j = 0; j < values.size(); ++j) {
        const Tensor vector = values[j].contiguous();
        Device::run(CvSquared<scalar_t>{.values = vector.const_data_ptr<scalar_t>(),
                                        .size = vector.numel(),
                                        .weight = weights[j],
                                        .first = j == 0,
                                        .result = result.mutable_data_ptr<acc_type<scalar_t>>()});
      }
    });
  });
  return result;
}

// Returns the gradients of the values.
template <typename Device>
std::vector<Tensor> weighted_cv_squared_backward(const Tensor& grad, at::TensorList values,
                                                 at::ArrayRef<double> weights) {
  constexpr auto op = "_weighted_cv_squared_backward";
  check_weighted_cv_squared(op, values, weights);
  check_argument(op, "grad", grad, values[0], accumulate_type(values[0]), {});
  std::vector<Tensor> gradients;
  for (const Tensor& each : values) gradients.push_back(empty_of(Device::empty, each));
  Device::compute(grad, [&] {
    with_type(values[0], [&]<typename scalar_t>() {
      for (size_t j = 0; j < values.size(); ++j) {
        const Tensor vector = values[j].contiguous();
        Device::run(
            CvSquaredBackward<scalar_t>{.grad = grad.const_data_ptr<acc_type<scalar_t>>(),
                                        .values = vector.const_data_ptr<scalar_t>(),
                                        .size = vector.numel(),
                                        .weight = weights[j],
                                        .grad_values = gradients[j].mutable_data_ptr<scalar_t>()});
      }
    });
  });
  return gradients;
}

}  // namespace moe_ext
