// The dispatch plan (a stable sort of the slots by expert) and the gather of the rows.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>
#include <tuple>

#include "../dispatch.h"
#include "../implement.h"
#include "slots.cuh"

namespace moe_ext::cuda {
namespace {

// From the sorted experts of the rows, computes the inverse permutation and offsets[e], the first
// row whose expert is e or later. One thread per row and per expert.
__global__ void plan_kernel(const int64_t* __restrict__ sorted,
                            const int64_t* __restrict__ permutation, int64_t num_rows,
                            int64_t num_experts, int64_t* __restrict__ inverse,
                            int64_t* __restrict__ tokens_per_expert,
                            int64_t* __restrict__ offsets) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < num_rows) inverse[permutation[i]] = i;
  if (i > num_experts) return;
  const auto first_row = [&](int64_t expert) {
    int64_t low = 0, high = num_rows;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (sorted[middle] < expert) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  };
  const int64_t begin = first_row(i);
  offsets[i] = begin;
  if (i < num_experts) tokens_per_expert[i] = first_row(i + 1) - begin;
}

// Slot t * k + j is the j-th expert of token t. The sort is stable, so the result is unique.
std::tuple<Tensor, Tensor, Tensor, Tensor> dispatch_plan_cuda(const Tensor& expert_index,
                                                              int64_t num_experts) {
  check_dispatch_plan(expert_index, num_experts);
  const c10::cuda::OptionalCUDAGuard guard(expert_index.device());
  const Tensor chosen = contiguous_index(expert_index);
  const int64_t num_rows = chosen.numel();
  const auto plan = dispatch_plan_outputs(empty, expert_index, num_experts);
  const auto& [permutation, inverse, tokens_per_expert, offsets] = plan;
  const auto options = chosen.options();
  const Tensor sorted = at::empty({num_rows}, options);
  if (num_rows > 0) {
    const Tensor slots = at::arange(num_rows, options);
    const int num_bits = std::bit_width(static_cast<uint64_t>(num_experts - 1));
    size_t num_bytes = 0;
    const auto sort = [&](void* space) {
      C10_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(
          space, num_bytes, chosen.const_data_ptr<int64_t>(), sorted.mutable_data_ptr<int64_t>(),
          slots.const_data_ptr<int64_t>(), permutation.mutable_data_ptr<int64_t>(), num_rows,
          /*begin_bit=*/0, /*end_bit=*/std::max(1, num_bits), at::cuda::getCurrentCUDAStream()));
    };
    sort(nullptr);  // returns the required number of bytes
    const Tensor space = at::empty({static_cast<int64_t>(num_bytes)}, options.dtype(at::kByte));
    sort(space.mutable_data_ptr());
  }
  launch(plan_kernel, grid(ceil_div(std::max(num_rows, num_experts + 1), kThreads)), kThreads, 0,
         sorted.const_data_ptr<int64_t>(), permutation.const_data_ptr<int64_t>(), num_rows,
         num_experts, inverse.mutable_data_ptr<int64_t>(),
         tokens_per_expert.mutable_data_ptr<int64_t>(), offsets.mutable_data_ptr<int64_t>());
  return plan;
}

Tensor dispatch_cuda(const Tensor& x, const Tensor& inverse, const OptionalTensor& token_offsets) {
  check_dispatch(x, inverse, token_offsets);
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  const Tensor row_of = contiguous_index(inverse);
  const OptionalTensor bounds = contiguous_index(token_offsets);
  Tensor rows = dispatch_output(empty, x, inverse);
  rows_of_slots(x.contiguous(), slots_of(row_of, bounds), rows);
  return rows;
}

// dx_t = sum of drows over the slots of t, in order.
Tensor dispatch_backward_cuda(const Tensor& grad_rows, const Tensor& inverse,
                              const OptionalTensor& token_offsets) {
  check_dispatch_backward(grad_rows, inverse, token_offsets);
  const c10::cuda::OptionalCUDAGuard guard(grad_rows.device());
  const Tensor row_of = contiguous_index(inverse);
  const OptionalTensor bounds = contiguous_index(token_offsets);
  Tensor grad_x = dispatch_gradient(empty, grad_rows, inverse, token_offsets);
  sum_of_rows(grad_rows.contiguous(), slots_of(row_of, bounds), /*weights=*/Tensor(), grad_x);
  return grad_x;
}

}  // namespace
}  // namespace moe_ext::cuda

TORCH_LIBRARY_IMPL(moe_ext, CUDA, m) {
  moe_ext::implement<"dispatch_plan", &moe_ext::cuda::dispatch_plan_cuda>(m);
  moe_ext::implement<"dispatch", &moe_ext::cuda::dispatch_cuda>(m);
  moe_ext::implement<"_dispatch_backward", &moe_ext::cuda::dispatch_backward_cuda>(m);
}
