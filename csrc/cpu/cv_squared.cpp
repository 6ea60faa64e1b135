// sum_j weights_j CV(values_j)^2 (Eq. 7) on the CPU.
#include "../cv_squared.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include "../implement.h"
#include "../math/cv_squared.h"
#include "empty_rows.h"
#include "vectorize.h"

namespace moe_ext::cpu {
namespace {

struct CvSquared {
  template <typename scalar_t, typename acc_t>
  MOE_EXT_KERNEL void run(const scalar_t* values, int64_t size, acc_t* mean, acc_t* cv_squared) {
    const acc_t count = static_cast<acc_t>(size);
    const acc_t center =
        sum_of_terms<acc_t>(
            size, [&](int64_t i, acc_t partial) __attribute__((
                      always_inline)) { return partial + static_cast<acc_t>(values[i]); }) /
        count;
    const acc_t squares = sum_of_terms<acc_t>(
        size, [&](int64_t i, acc_t partial) __attribute__((always_inline)) {
          const acc_t u = math::relative_deviation(static_cast<acc_t>(values[i]), center);
          return partial + u * u;
        });
    *mean = center;
    *cv_squared = squares / count;
  }
};

struct CvSquaredBackward {
  template <typename scalar_t, typename acc_t>
  MOE_EXT_KERNEL void run(const scalar_t* values, int64_t size, acc_t mean, acc_t cv_squared,
                          acc_t slope, scalar_t* grad) {
    for (int64_t i = 0; i < size; ++i) {
      const acc_t u = math::relative_deviation(static_cast<acc_t>(values[i]), mean);
      grad[i] = static_cast<scalar_t>((u - cv_squared) * slope);
    }
  }
};

Tensor weighted_cv_squared_cpu(at::TensorList values, at::ArrayRef<double> weights) {
  check_weighted_cv_squared("weighted_cv_squared", values, weights);
  Tensor result = weighted_cv_squared_output(empty, values);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, values[0].scalar_type(),
                                  "weighted_cv_squared", [&] {
                                    using acc_t = at::opmath_type<scalar_t>;
                                    acc_t sum = 0, mean = 0, cv_squared = 0;
                                    for (size_t j = 0; j < values.size(); ++j) {
                                      if (weights[j] == 0) continue;
                                      const Tensor contiguous = values[j].contiguous();
                                      vectorized<CvSquared>(contiguous.const_data_ptr<scalar_t>(),
                                                            contiguous.numel(), &mean, &cv_squared);
                                      sum += static_cast<acc_t>(weights[j]) * cv_squared;
                                    }
                                    *result.mutable_data_ptr<acc_t>() = sum;
                                  });
  return result;
}

std::vector<Tensor> weighted_cv_squared_backward_cpu(const Tensor& grad, at::TensorList values,
                                                     at::ArrayRef<double> weights) {
  check_weighted_cv_squared_backward(grad, values, weights);
  std::vector<Tensor> gradients = weighted_cv_squared_gradients(empty, values);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, values[0].scalar_type(), "weighted_cv_squared", [&] {
        using acc_t = at::opmath_type<scalar_t>;
        acc_t mean = 0, cv_squared = 0;
        for (size_t j = 0; j < values.size(); ++j) {
          if (weights[j] == 0) {
            gradients[j].zero_();
            continue;
          }
          const Tensor contiguous = values[j].contiguous();
          const auto* data = contiguous.const_data_ptr<scalar_t>();
          const int64_t size = contiguous.numel();
          vectorized<CvSquared>(data, size, &mean, &cv_squared);
          const acc_t weighted = static_cast<acc_t>(weights[j]) * *grad.const_data_ptr<acc_t>();
          vectorized<CvSquaredBackward>(
              data, size, mean, cv_squared,
              math::cv_squared_slope(weighted, static_cast<acc_t>(size), mean),
              gradients[j].mutable_data_ptr<scalar_t>());
        }
      });
  return gradients;
}

}  // namespace
}  // namespace moe_ext::cpu

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  moe_ext::implement<"weighted_cv_squared", &moe_ext::cpu::weighted_cv_squared_cpu>(m);
  moe_ext::implement<"_weighted_cv_squared_backward",
                     &moe_ext::cpu::weighted_cv_squared_backward_cpu>(m);
}
