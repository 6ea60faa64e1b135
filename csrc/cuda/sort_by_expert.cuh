// Slots in the order of their experts, and of their own among those of one expert.
#pragma once

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include <bit>
#include <cub/device/device_radix_sort.cuh>
#include <tuple>

#include "launch.cuh"

namespace moe_ext::cuda {

// offsets[e] = the first row of expert e or of a later one.
static __global__ void offsets_kernel(const int64_t* __restrict__ sorted, int64_t num_rows,
                                      int64_t num_experts, int64_t* __restrict__ offsets,
                                      int64_t* __restrict__ tokens_per_expert) {
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
  const int64_t expert = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (expert > num_experts) return;
  const int64_t begin = first_row(expert);
  offsets[expert] = begin;
  if (expert < num_experts) tokens_per_expert[expert] = first_row(expert + 1) - begin;
}

// permutation [R] from row to slot, tokens_per_expert [E] and offsets [E + 1] of a contiguous
// expert_index with values in [0, E). The sort is stable, so that there is one result.
inline std::tuple<Tensor, Tensor, Tensor> sort_by_expert(const Tensor& expert_index,
                                                         int64_t num_experts) {
  const int64_t num_rows = expert_index.numel();
  const auto options = expert_index.options();
  Tensor permutation = at::empty({num_rows}, options);
  Tensor tokens_per_expert = at::empty({num_experts}, options);
  Tensor offsets = at::empty({num_experts + 1}, options);
  const Tensor sorted = at::empty({num_rows}, options);
  if (num_rows > 0) {
    const Tensor slots = at::arange(num_rows, options);
    const int num_bits = std::bit_width(static_cast<uint64_t>(num_experts - 1));
    size_t num_bytes = 0;
    const auto sort = [&](void* space) {
      C10_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(
          space, num_bytes, expert_index.const_data_ptr<int64_t>(),
          sorted.mutable_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>(),
          permutation.mutable_data_ptr<int64_t>(), num_rows, /*begin_bit=*/0,
          /*end_bit=*/std::max(1, num_bits), at::cuda::getCurrentCUDAStream()));
    };
    sort(nullptr);  // asks how much space it needs
    const Tensor space = at::empty({static_cast<int64_t>(num_bytes)}, options.dtype(at::kByte));
    sort(space.mutable_data_ptr());
  }
  launch(offsets_kernel, grid(ceil_div(num_experts + 1, kThreads)), kThreads, 0,
         sorted.const_data_ptr<int64_t>(), num_rows, num_experts,
         offsets.mutable_data_ptr<int64_t>(), tokens_per_expert.mutable_data_ptr<int64_t>());
  return {permutation, tokens_per_expert, offsets};
}

}  // namespace moe_ext::cuda
