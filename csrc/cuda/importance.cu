// Importance(X) = sum_x G(x) (Eq. 6) on CUDA.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "sort_by_expert.cuh"

namespace moe_ext::cuda {
namespace {

// A block for each expert: the sum over its slots, in a fixed order.
template <typename scalar_t, typename acc_t>
__global__ void importance_kernel(const scalar_t* __restrict__ gates,
                                  const int64_t* __restrict__ permutation,
                                  const int64_t* __restrict__ offsets,
                                  acc_t* __restrict__ importance) {
  __shared__ acc_t space[kThreads / kWarp];
  const int64_t expert = blockIdx.x;
  const int64_t end = offsets[expert + 1];
  acc_t sum = 0;
  for (int64_t row = offsets[expert] + threadIdx.x; row < end; row += blockDim.x) {
    sum += static_cast<acc_t>(gates[permutation[row]]);
  }
  sum = block_sum(sum, space);
  if (threadIdx.x == 0) importance[expert] = sum;
}

Tensor importance_cuda(const Tensor& gates, const Tensor& expert_index, int64_t num_experts) {
  check_importance(gates, expert_index, num_experts);
  const c10::cuda::OptionalCUDAGuard guard(gates.device());
  const Tensor kept = gates.contiguous();
  const auto [permutation, tokens_per_expert, offsets] =
      sort_by_expert(expert_index.contiguous(), num_experts);
  Tensor importance = at::empty({num_experts}, kept.options().dtype(accumulate_type(kept)));
  // As many threads as an expert has slots on average, in whole warps.
  const int64_t num_warps = ceil_div(kept.numel(), num_experts * kWarp);
  const int num_threads = static_cast<int>(std::clamp<int64_t>(num_warps * kWarp, kWarp, kThreads));
  const int64_t* slot_of = permutation.const_data_ptr<int64_t>();
  const int64_t* bounds = offsets.const_data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, kept.scalar_type(), "importance", [&] {
    using acc_t = at::opmath_type<scalar_t>;
    launch(importance_kernel<scalar_t, acc_t>, grid(num_experts), num_threads, 0,
           kept.const_data_ptr<scalar_t>(), slot_of, bounds, importance.mutable_data_ptr<acc_t>());
  });
  return importance;
}

}  // namespace
}  // namespace moe_ext::cuda

TORCH_LIBRARY_IMPL(moe_ext, CUDA, m) { m.impl("importance", &moe_ext::cuda::importance_cuda); }
