// The dispatch plan (a stable sort of the routed rows by expert) and the gather of the rows.
#include <ATen/ops/arange.h>
#include <torch/library.h>

#include <bit>
#include <tuple>

#include "slots.cuh"
#include "sort_by_expert.cuh"

namespace moe_ext::cuda {
namespace {

__global__ void inverse_kernel(const int64_t* __restrict__ permutation, int64_t num_rows,
                               int64_t* __restrict__ inverse) {
  for (int64_t row = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; row < num_rows;
       row += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    inverse[permutation[row]] = row;
  }
}

// Slot t * k + j is the j-th choice of token t.
std::tuple<Tensor, Tensor, Tensor, Tensor> dispatch_plan_cuda(const Tensor& expert_index,
                                                              int64_t num_experts) {
  check_dispatch_plan(expert_index, num_experts);
  const c10::cuda::OptionalCUDAGuard guard(expert_index.device());
  const Tensor chosen = expert_index.contiguous();
  const auto [permutation, tokens_per_expert, offsets] = sort_by_expert(chosen, num_experts);
  Tensor inverse = at::empty(chosen.sizes(), chosen.options());
  launch(inverse_kernel, strided_grid(chosen.numel()), kThreads, 0,
         permutation.const_data_ptr<int64_t>(), chosen.numel(),
         inverse.mutable_data_ptr<int64_t>());
  return {permutation, inverse, tokens_per_expert, offsets};
}

// A thread copies some columns of one token to all of its rows.
template <typename Packed>
__global__ void dispatch_kernel(const Packed* __restrict__ x, Slots slots, int64_t packs,
                                Packed* __restrict__ rows) {
  const int64_t all = slots.num_tokens * packs;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < all;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t t = i / packs;
    const int64_t pack = i % packs;
    const Packed value = x[i];
    const int64_t end = slots.end(t);
    for (int64_t slot = slots.begin(t); slot < end; ++slot) {
      rows[slots.row(slot) * packs + pack] = value;
    }
  }
}

Tensor dispatch_cuda(const Tensor& x, const Tensor& inverse, const OptionalTensor& token_offsets) {
  check_dispatch(x, inverse, token_offsets);
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  const Tensor source = x.contiguous();
  const Tensor row_of = inverse.contiguous();
  const OptionalTensor bounds = contiguous(token_offsets);
  const Slots slots = slots_of(row_of, bounds);
  const int64_t width = x.size(1);
  Tensor rows = at::empty({slots.num_slots, width}, x.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "dispatch", [&] {
    const auto* source_data = source.const_data_ptr<scalar_t>();
    auto* rows_data = rows.mutable_data_ptr<scalar_t>();
    with_pack_size<scalar_t>(width, {source_data, rows_data}, [&](auto size) {
      using Packed = Pack<scalar_t, size>;
      launch(dispatch_kernel<Packed>, strided_grid(slots.num_tokens * (width / size)), kThreads, 0,
             reinterpret_cast<const Packed*>(source_data), slots, width / size,
             reinterpret_cast<Packed*>(rows_data));
    });
  });
  return rows;
}

// dx_t = the sum of drows over the slots of t, in their order.
Tensor dispatch_backward_cuda(const Tensor& grad_rows, const Tensor& inverse,
                              const OptionalTensor& token_offsets) {
  check_dispatch_backward(grad_rows, inverse, token_offsets);
  const c10::cuda::OptionalCUDAGuard guard(grad_rows.device());
  const Tensor row_of = inverse.contiguous();
  const OptionalTensor bounds = contiguous(token_offsets);
  return sum_of_rows(grad_rows.contiguous(), slots_of(row_of, bounds), /*weights=*/Tensor());
}

}  // namespace
}  // namespace moe_ext::cuda

TORCH_LIBRARY_IMPL(moe_ext, CUDA, m) {
  m.impl("dispatch_plan", &moe_ext::cuda::dispatch_plan_cuda);
  m.impl("dispatch", &moe_ext::cuda::dispatch_cuda);
  m.impl("_dispatch_backward", &moe_ext::cuda::dispatch_backward_cuda);
}
