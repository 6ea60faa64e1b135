// sum_j weights_j CV(values_j)^2 (Eq. 7) on CUDA.

#include "../kernels/cv_squared.h"
#include "../math/cv_squared.h"
#include "launch.cuh"

namespace moe_ext {
namespace cuda {
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

}  // namespace
}  // namespace cuda
using namespace cuda;

template <typename scalar_t>
void CvSquared<scalar_t>::on_cuda(const CudaStream& stream) const {
  launch_blocks(stream, cv_squared_kernel<scalar_t, acc_type<scalar_t>>, 1, values, size, weight,
                first, result);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(CvSquared)

template <typename scalar_t>
void CvSquaredBackward<scalar_t>::on_cuda(const CudaStream& stream) const {
  launch_blocks(stream, cv_squared_backward_kernel<scalar_t, acc_type<scalar_t>>, 1, grad, values,
                size, weight, grad_values);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(CvSquaredBackward)

}  // namespace moe_ext
