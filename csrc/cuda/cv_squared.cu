// CV(values)^2 (Eq. 7) on CUDA.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include "../cv_squared.h"
#include "../math/cv_squared.h"
#include "launch.cuh"

namespace moe_ext::cuda {
namespace {

// One block sums all values, in an order that depends on their number only.
template <typename scalar_t, typename acc_t>
__global__ void cv_squared_kernel(const scalar_t* __restrict__ values, int64_t size,
                                  acc_t* __restrict__ result) {
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
  squares = block_sum(squares, space);
  if (threadIdx.x == 0) *result = squares / count;
}

Tensor cv_squared_cuda(const Tensor& values) {
  check_cv_squared(values);
  const c10::cuda::OptionalCUDAGuard guard(values.device());
  const Tensor contiguous = values.contiguous();
  Tensor result = cv_squared_output(empty, values);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, contiguous.scalar_type(), "cv_squared",
                                  [&] {
                                    using acc_t = at::opmath_type<scalar_t>;
                                    launch(cv_squared_kernel<scalar_t, acc_t>, grid(1), kThreads, 0,
                                           contiguous.const_data_ptr<scalar_t>(),
                                           contiguous.numel(), result.mutable_data_ptr<acc_t>());
                                  });
  return result;
}

}  // namespace
}  // namespace moe_ext::cuda

TORCH_LIBRARY_IMPL(moe_ext, CUDA, m) { m.impl("cv_squared", &moe_ext::cuda::cv_squared_cuda); }
