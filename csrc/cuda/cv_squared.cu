// sum_j weights_j CV(values_j)^2 (Eq. 7) on CUDA.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include "../cv_squared.h"
#include "../implement.h"
#include "../math/cv_squared.h"
#include "launch.cuh"

namespace moe_ext::cuda {
namespace {

template <typename acc_t>
struct Moments {
  acc_t count, mean, cv_squared;
};

// The block of one vector sums its values, in an order that depends on their number only.
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ Moments<acc_t> moments_of(const scalar_t* __restrict__ values,
                                                     int64_t size) {
  __shared__ acc_t space[kThreads / kWarp];
  const acc_t count = static_cast<acc_t>(size);
  acc_t total = 0;
  for (int64_t i = threadIdx.x; i < size; i += kThreads) total += static_cast<acc_t>(values[i]);
  const acc_t mean = block_sum(total, space) / count;
  acc_t squares = 0;
  for (int64_t i = threadIdx.x; i < size; i += kThreads) {
    const acc_t u = math::relative_deviation(static_cast<acc_t>(values[i]), mean);
    squares += u * u;
  }
  return {.count = count, .mean = mean, .cv_squared = block_sum(squares, space) / count};
}

// Adds weight CV(values)^2 to the result of the vectors before.
template <typename scalar_t, typename acc_t>
__global__ void cv_squared_kernel(const scalar_t* __restrict__ values, int64_t size, acc_t weight,
                                  bool first, acc_t* __restrict__ result) {
  const acc_t cv_squared = moments_of<scalar_t, acc_t>(values, size).cv_squared;
  if (threadIdx.x != 0) return;
  *result = (first ? acc_t(0) : *result) + (weight == acc_t(0) ? acc_t(0) : weight * cv_squared);
}

template <typename scalar_t, typename acc_t>
__global__ void cv_squared_backward_kernel(const acc_t* __restrict__ grad,
                                           const scalar_t* __restrict__ values, int64_t size,
                                           acc_t weight, scalar_t* __restrict__ grad_values) {
  const auto moments = moments_of<scalar_t, acc_t>(values, size);
  const acc_t slope = math::cv_squared_slope(weight * *grad, moments.count, moments.mean);
  for (int64_t i = threadIdx.x; i < size; i += kThreads) {
    const acc_t u = math::relative_deviation(static_cast<acc_t>(values[i]), moments.mean);
    grad_values[i] =
        weight == acc_t(0) ? scalar_t(0) : static_cast<scalar_t>((u - moments.cv_squared) * slope);
  }
}

// Calls body(j, data, size) for each vector; data has the type of the values.
template <typename Body>
void for_each_vector(at::TensorList values, const Body& body) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, values[0].scalar_type(), "weighted_cv_squared", [&] {
        for (size_t j = 0; j < values.size(); ++j) {
          const Tensor contiguous = values[j].contiguous();
          body(j, contiguous.const_data_ptr<scalar_t>(), contiguous.numel());
        }
      });
}

Tensor weighted_cv_squared_cuda(at::TensorList values, at::ArrayRef<double> weights) {
  check_weighted_cv_squared("weighted_cv_squared", values, weights);
  const c10::cuda::OptionalCUDAGuard guard(values[0].device());
  Tensor result = weighted_cv_squared_output(empty, values);
  for_each_vector(values, [&]<typename scalar_t>(size_t j, const scalar_t* data, int64_t size) {
    using acc_t = at::opmath_type<scalar_t>;
    launch(cv_squared_kernel<scalar_t, acc_t>, grid(1), kThreads, 0, data, size, weights[j], j == 0,
           result.mutable_data_ptr<acc_t>());
  });
  return result;
}

std::vector<Tensor> weighted_cv_squared_backward_cuda(const Tensor& grad, at::TensorList values,
                                                      at::ArrayRef<double> weights) {
  check_weighted_cv_squared_backward(grad, values, weights);
  const c10::cuda::OptionalCUDAGuard guard(grad.device());
  std::vector<Tensor> gradients = weighted_cv_squared_gradients(empty, values);
  for_each_vector(values, [&]<typename scalar_t>(size_t j, const scalar_t* data, int64_t size) {
    using acc_t = at::opmath_type<scalar_t>;
    launch(cv_squared_backward_kernel<scalar_t, acc_t>, grid(1), kThreads, 0,
           grad.const_data_ptr<acc_t>(), data, size, weights[j],
           gradients[j].mutable_data_ptr<scalar_t>());
  });
  return gradients;
}

}  // namespace
}  // namespace moe_ext::cuda

TORCH_LIBRARY_IMPL(moe_ext, CUDA, m) {
  moe_ext::implement<"weighted_cv_squared", &moe_ext::cuda::weighted_cv_squared_cuda>(m);
  moe_ext::implement<"_weighted_cv_squared_backward",
                     &moe_ext::cuda::weighted_cv_squared_backward_cuda>(m);
}
