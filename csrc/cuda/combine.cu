// y_t = sum_j G(x_t)_j E_j(x_t) (Eq. 1), gathered through the inverse permutation.

#include "../kernels/combine.h"
#include "vectors.cuh"

namespace moe_ext {
namespace cuda {
namespace {

// dE_j = G_j dy and dG_j = <dy, E_j>; one warp per token.
template <typename scalar_t, typename acc_t, int kSize>
__global__ void combine_backward_kernel(const scalar_t* __restrict__ grad_y,
                                        const scalar_t* __restrict__ rows,
                                        const acc_t* __restrict__ gates, Slots slots, int64_t width,
                                        scalar_t* __restrict__ grad_rows,
                                        acc_t* __restrict__ grad_gates) {
  using Vec = Vector<scalar_t, kSize>;
  const int64_t t = index_of_warp();
  const int lane = threadIdx.x % kWarp;
  if (t >= slots.num_tokens) return;  // uniform over the warp
  const auto* grad = reinterpret_cast<const Vec*>(grad_y + t * width);
  const int64_t end = slots.end(t);
  for (int64_t slot = slots.begin(t); slot < end; ++slot) {
    const int64_t row = slots.row(slot) * width;
    const auto* from = reinterpret_cast<const Vec*>(rows + row);
    auto* to = reinterpret_cast<Vec*>(grad_rows + row);
    const acc_t gate = gates[slot];
    acc_t product = 0;
    for (int64_t vector = lane; vector < width / kSize; vector += kWarp) {
      const Vec dy = grad[vector];
      const Vec e = from[vector];
      Vec scaled;
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        const acc_t g = static_cast<acc_t>(dy.values[d]);
        product = std::fma(g, static_cast<acc_t>(e.values[d]), product);
        scaled.values[d] = static_cast<scalar_t>(gate * g);
      }
      to[vector] = scaled;
    }
    product = warp_sum(product);
    if (lane == 0) grad_gates[slot] = product;
  }
}

}  // namespace
}  // namespace cuda
using namespace cuda;

template <typename scalar_t>
void CombineBackward<scalar_t>::on_cuda(const CudaStream& stream) const {
  with_vector_size<scalar_t>(width, {grad_y, rows, grad_rows}, [&](auto size) {
    launch_warps(stream, combine_backward_kernel<scalar_t, acc_t, size>, slots.num_tokens, grad_y,
                 rows, gates, slots, width, grad_rows, grad_gates);
  });
}
MOE_EXT_DEFINE_RUN_ON_CUDA(CombineBackward)

}  // namespace moe_ext
