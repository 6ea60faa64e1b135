// y_t = sum_j G(x_t)_j E_j(x_t) (Eq. 1), gathered through the inverse permutation.
#include <torch/library.h>

#include <tuple>

#include "../combine.h"
#include "../implement.h"
#include "slots.cuh"

namespace moe_ext::cuda {
namespace {

Tensor combine_cuda(const Tensor& expert_output, const Tensor& gates, const Tensor& inverse,
                    const OptionalTensor& token_offsets) {
  check_combine("combine", expert_output, gates, inverse, token_offsets);
  const c10::cuda::OptionalCUDAGuard guard(expert_output.device());
  const Tensor row_of = contiguous_index(inverse);
  const OptionalTensor bounds = contiguous_index(token_offsets);
  Tensor y = combine_output(empty, expert_output, inverse, token_offsets);
  sum_of_rows(expert_output.contiguous(), slots_of(row_of, bounds),
              gates.to(accumulate_type(expert_output)).contiguous(), y);
  return y;
}

// dE_j = G_j dy and dG_j = <dy, E_j>; one warp per token.
template <typename scalar_t, typename acc_t, int kSize>
__global__ void combine_backward_kernel(const scalar_t* __restrict__ grad_y,
                                        const scalar_t* __restrict__ rows,
                                        const acc_t* __restrict__ gates, Slots slots, int64_t width,
                                        scalar_t* __restrict__ grad_rows,
                                        acc_t* __restrict__ grad_gates) {
  using Packed = Pack<scalar_t, kSize>;
  const int64_t t = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (t >= slots.num_tokens) return;  // uniform over the warp
  const auto* grad = reinterpret_cast<const Packed*>(grad_y + t * width);
  const int64_t end = slots.end(t);
  for (int64_t slot = slots.begin(t); slot < end; ++slot) {
    const int64_t row = slots.row(slot) * width;
    const auto* from = reinterpret_cast<const Packed*>(rows + row);
    auto* to = reinterpret_cast<Packed*>(grad_rows + row);
    const acc_t gate = gates[slot];
    acc_t product = 0;
    for (int64_t pack = lane; pack < width / kSize; pack += kWarp) {
      const Packed dy = grad[pack];
      const Packed e = from[pack];
      Packed scaled;
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        const acc_t g = static_cast<acc_t>(dy.values[d]);
        product = std::fma(g, static_cast<acc_t>(e.values[d]), product);
        scaled.values[d] = static_cast<scalar_t>(gate * g);
      }
      to[pack] = scaled;
    }
    product = warp_sum(product);
    if (lane == 0) grad_gates[slot] = product;
  }
}

std::tuple<Tensor, Tensor> combine_backward_cuda(const Tensor& grad_y, const Tensor& expert_output,
                                                 const Tensor& gates, const Tensor& inverse,
                                                 const OptionalTensor& token_offsets) {
  check_combine_backward(grad_y, expert_output, gates, inverse, token_offsets);
  const c10::cuda::OptionalCUDAGuard guard(expert_output.device());
  const Tensor row_of = contiguous_index(inverse);
  const OptionalTensor bounds = contiguous_index(token_offsets);
  const Slots slots = slots_of(row_of, bounds);
  const int64_t width = expert_output.size(1);
  const Tensor grad = grad_y.contiguous();
  const Tensor rows = expert_output.contiguous();
  const Tensor weights = gates.to(accumulate_type(rows)).contiguous();
  const auto [grad_rows, grad_weights] = combine_gradients(empty, rows, weights);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, rows.scalar_type(), "combine_backward", [&] {
        using acc_t = at::opmath_type<scalar_t>;
        const auto* grad_data = grad.const_data_ptr<scalar_t>();
        const auto* rows_data = rows.const_data_ptr<scalar_t>();
        auto* grad_rows_data = grad_rows.mutable_data_ptr<scalar_t>();
        with_pack_size<scalar_t>(width, {grad_data, rows_data, grad_rows_data}, [&](auto size) {
          launch(combine_backward_kernel<scalar_t, acc_t, size>,
                 grid(ceil_div(slots.num_tokens * kWarp, kThreads)), kThreads, 0, grad_data,
                 rows_data, weights.const_data_ptr<acc_t>(), slots, width, grad_rows_data,
                 grad_weights.mutable_data_ptr<acc_t>());
        });
      });
  return {grad_rows, grad_weights.to(gates.scalar_type())};
}

}  // namespace
}  // namespace moe_ext::cuda

TORCH_LIBRARY_IMPL(moe_ext, CUDA, m) {
  moe_ext::implement<"combine", &moe_ext::cuda::combine_cuda>(m);
  moe_ext::implement<"_combine_backward", &moe_ext::cuda::combine_backward_cuda>(m);
}
