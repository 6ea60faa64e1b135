// Sums over the tokens for each expert: over chunks of the tokens by each operator's own kernel,
// then over the chunks.
#pragma once

#include "launch.cuh"

namespace moe_ext::cuda {

// The groups of rows: between two offsets each, or one of all.
struct Groups {
  const int64_t* bounds;  // null: one
  int64_t num_groups;
  int64_t num_tokens;

  __device__ int64_t begin(int64_t group) const { return bounds ? bounds[group] : 0; }
  __device__ int64_t end(int64_t group) const {
    return group + 1 < num_groups ? bounds[group + 1] : num_tokens;
  }
  // The last group that begins at or before the token: it is the one that has the token.
  __device__ int64_t of(int64_t token) const {
    int64_t low = 0, high = num_groups - 1;
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      if (bounds[middle] <= token) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

// The sum over the chunks of each group, for kWarp experts: a block, in the order of its warps.
template <typename acc_t>
__global__ void sum_of_chunks_kernel(const acc_t* __restrict__ partial_sums, int64_t num_experts,
                                     Groups groups, int64_t chunk_size, acc_t* __restrict__ sums) {
  __shared__ acc_t sums_of_warps[kThreads / kWarp][kWarp];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t tiles = ceil_div(num_experts, kWarp);
  const int64_t group = blockIdx.x / tiles;
  const int64_t expert = blockIdx.x % tiles * kWarp + lane;
  const int64_t begin = groups.begin(group);
  const int64_t end = groups.end(group);
  acc_t sum = 0;
  if (begin < end && expert < num_experts) {
    const int64_t last_chunk = (end - 1) / chunk_size;
    for (int64_t chunk = begin / chunk_size + warp; chunk <= last_chunk;
         chunk += kThreads / kWarp) {
      sum += partial_sums[(chunk + group) * num_experts + expert];
    }
  }
  sums_of_warps[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && expert < num_experts) {
    for (int w = 1; w < kThreads / kWarp; ++w) sum += sums_of_warps[w][lane];
    sums[group * num_experts + expert] = sum;
  }
}

}  // namespace moe_ext::cuda
