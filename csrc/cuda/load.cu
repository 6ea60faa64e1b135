// Load(X)_i = sum_x P(x, i) (App. A) on CUDA.

#include "../kernels/load.h"
#include "../math/load.h"
#include "chunks.cuh"

namespace moe_ext {
namespace cuda {
namespace {

// Sums a chunk of the tokens for kWarp experts; one warp.
template <typename scalar_t, typename acc_t>
__global__ void partial_load_kernel(const scalar_t* __restrict__ clean_logits,
                                    const acc_t* __restrict__ noise_stddev,
                                    const acc_t* __restrict__ threshold,
                                    const int64_t* __restrict__ expert_index, int64_t k,
                                    int64_t num_experts, RowGroups groups, int64_t chunk_size,
                                    acc_t* __restrict__ partial_load) {
  constexpr int kAhead = 4;  // tokens that are loaded at the same time
  const int lane = threadIdx.x % kWarp;
  const int64_t warp = index_of_warp();
  const int64_t tiles = ceil_div(num_experts, kWarp);
  const int64_t chunk = warp / tiles;
  const int64_t first_expert = warp % tiles * kWarp;
  const int64_t expert = first_expert + lane;
  const auto add = [&](int64_t first, int count, acc_t(&sum)[1]) {
    // Each lane has the thresholds of one token, and a bit mask of its chosen experts in this tile.
    acc_t outside = 0, inside = 0;
    unsigned chosen = 0;
    if (const int64_t token = first + lane; lane < count) {
      outside = threshold[2 * token];
      inside = threshold[2 * token + 1];
      for (int64_t j = 0; j < k; ++j) {
        const int64_t place = expert_index[token * k + j] - first_expert;
        if (place >= 0 && place < kWarp) chosen |= 1u << place;
      }
    }
    for (int l = 0; l < count; l += kAhead) {
      scalar_t clean[kAhead];
      acc_t stddev[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const bool there = l + i < count && expert < num_experts;
        const int64_t at = (first + l + i) * num_experts + expert;
        clean[i] = there ? clean_logits[at] : scalar_t(0);
        stddev[i] = there ? noise_stddev[at] : acc_t(0);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (l + i < count) {  // uniform over the warp
          const acc_t if_outside = __shfl_sync(kAllLanes, outside, l + i);
          const acc_t if_inside = __shfl_sync(kAllLanes, inside, l + i);
          const bool is_inside = __shfl_sync(kAllLanes, chosen, l + i) >> lane & 1u;
          sum[0] += math::prob_in_top_k(static_cast<acc_t>(clean[i]),
                                        is_inside ? if_inside : if_outside, stddev[i]);
        }
      }
    }
  };
  sums_of_chunk<acc_t, 1>(groups, chunk, chunk_size, add, [&](int64_t place, const auto& sum) {
    if (expert < num_experts) partial_load[place * num_experts + expert] = sum[0];
  });
}

// One warp per token. With q_i = dL/dP_i phi(z_i) / stddev_i, the thresholds get dH_(k) = -sum of q
// over the experts outside the top k, and dH_(k+1) = -sum over the experts inside it.
template <typename scalar_t, typename acc_t>
__global__ void load_backward_kernel(
    const acc_t* __restrict__ grad_load, const scalar_t* __restrict__ clean_logits,
    const acc_t* __restrict__ noise_stddev, const acc_t* __restrict__ threshold,
    const int64_t* __restrict__ expert_index, int64_t k, int64_t num_experts, RowGroups groups,
    scalar_t* __restrict__ grad_clean_logits, acc_t* __restrict__ grad_noise_stddev,
    acc_t* __restrict__ grad_threshold) {
  const int lane = threadIdx.x % kWarp;
  const int64_t token = index_of_warp();
  if (token >= groups.num_rows) return;  // uniform over the warp
  const acc_t* grad_prob = grad_load + groups.group_of(token) * num_experts;
  const acc_t if_outside = threshold[2 * token];
  const acc_t if_inside = threshold[2 * token + 1];
  acc_t outside = 0, inside = 0;
  for (int64_t first = 0; first < num_experts; first += kWarp) {
    unsigned chosen = 0;  // a bit mask of the chosen experts in this tile
    for (int64_t j = lane; j < k; j += kWarp) {
      const int64_t place = expert_index[token * k + j] - first;
      if (place >= 0 && place < kWarp) chosen |= 1u << place;
    }
    chosen = __reduce_or_sync(kAllLanes, chosen);
    const int64_t expert = first + lane;
    if (expert < num_experts) {
      const bool is_inside = chosen >> lane & 1u;
      const int64_t at = token * num_experts + expert;
      const auto grad = math::prob_in_top_k_gradient(static_cast<acc_t>(clean_logits[at]),
                                                     is_inside ? if_inside : if_outside,
                                                     noise_stddev[at], grad_prob[expert]);
      grad_clean_logits[at] = static_cast<scalar_t>(grad.clean);
      grad_noise_stddev[at] = grad.stddev;
      outside += is_inside ? acc_t(0) : grad.clean;
      inside += is_inside ? grad.clean : acc_t(0);
    }
  }
  outside = warp_sum(outside);
  inside = warp_sum(inside);
  if (lane == 0) {
    grad_threshold[2 * token] = -outside;
    grad_threshold[2 * token + 1] = -inside;
  }
}

}  // namespace
}  // namespace cuda
using namespace cuda;

template <typename scalar_t>
void Load<scalar_t>::on_cuda(const CudaStream& stream) const {
  const int64_t num_tokens = groups.num_rows, chunk_size = chunk_size_of(num_tokens);
  const int64_t num_chunks = ceil_div(num_tokens, chunk_size);
  const int64_t tiles = ceil_div(num_experts, kWarp);
  auto* partial_load = stream.take<acc_t>((num_chunks + groups.num_groups) * num_experts);
  launch_warps(stream, partial_load_kernel<scalar_t, acc_t>, num_chunks * tiles, clean_logits,
               noise_stddev, threshold, expert_index, k, num_experts, groups, chunk_size,
               partial_load);
  launch_blocks(stream, sum_of_chunks_kernel<acc_t>, groups.num_groups * tiles, partial_load,
                num_experts, groups, chunk_size, load);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(Load)

template <typename scalar_t>
void LoadBackward<scalar_t>::on_cuda(const CudaStream& stream) const {
  launch_warps(stream, load_backward_kernel<scalar_t, acc_t>, groups.num_rows, grad_load,
               clean_logits, noise_stddev, threshold, expert_index, k, num_experts, groups,
               grad_clean_logits, grad_noise_stddev, grad_threshold);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(LoadBackward)

}  // namespace moe_ext
