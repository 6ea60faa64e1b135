// Sums over rows, by group and column. Each operator's own kernel sums chunks of rows; then
// sum_of_chunks_kernel sums the chunks.
#pragma once

#include <algorithm>

#include "../kernels/row_groups.h"
#include "launch.cuh"

namespace moe_ext::cuda {

// Returns the number of rows in a chunk, a multiple of kWarp. There are enough chunks to keep the
// device busy, and few enough to be summed quickly.
inline int64_t chunk_size_of(int64_t num_rows) {
  constexpr int64_t kMostChunks = 1024;
  return kWarp * std::max<int64_t>(1, ceil_div(num_rows, kWarp * kMostChunks));
}

// Sums a chunk for a thread's kSize columns, with a separate sum for each group in the chunk. The
// function add(first, count, sum) adds some rows; write(place, sum) receives the sums of a group.
// In row order, each next (chunk, group) pair has a larger chunk or a larger group. The place chunk
// + group is therefore unique to the pair.
template <typename acc_t, int kSize, typename Add, typename Write>
__device__ __forceinline__ void sums_of_chunk(const RowGroups& groups, int64_t chunk,
                                              int64_t chunk_size, const Add& add,
                                              const Write& write) {
  const int64_t end = std::min(groups.num_rows, (chunk + 1) * chunk_size);
  for (int64_t first = chunk * chunk_size; first < end;) {
    const int64_t group = groups.group_of(first);
    const int64_t group_end = std::min(end, groups.end(group));
    acc_t sum[kSize] = {};
    while (first < group_end) {
      // Runs of up to kWarp rows: a single long sum would round away small terms.
      const int count =
          static_cast<int>(std::min<int64_t>(kWarp - first % kWarp, group_end - first));
      acc_t sum_of_run[kSize] = {};
      add(first, count, sum_of_run);
#pragma unroll
      for (int d = 0; d < kSize; ++d) sum[d] += sum_of_run[d];
      first += count;
    }
    write(chunk + group, sum);
  }
}

// Sums the chunks of a group for kWarp columns, in the order of the block's warps. One block per
// group and kWarp columns.
template <typename acc_t>
__global__ void sum_of_chunks_kernel(const acc_t* __restrict__ partial_sums, int64_t columns,
                                     RowGroups groups, int64_t chunk_size,
                                     acc_t* __restrict__ sums) {
  __shared__ acc_t sums_of_warps[kThreads / kWarp][kWarp];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t tiles = ceil_div(columns, kWarp);
  const int64_t group = blockIdx.x / tiles;
  const int64_t column = blockIdx.x % tiles * kWarp + lane;
  const int64_t begin = groups.begin(group);
  const int64_t end = groups.end(group);
  acc_t sum = 0;
  if (begin < end && column < columns) {
    const int64_t last_chunk = (end - 1) / chunk_size;
    for (int64_t chunk = begin / chunk_size + warp; chunk <= last_chunk;
         chunk += kThreads / kWarp) {
      sum += partial_sums[(chunk + group) * columns + column];
    }
  }
  sums_of_warps[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && column < columns) {
    for (int w = 1; w < kThreads / kWarp; ++w) sum += sums_of_warps[w][lane];
    sums[group * columns + column] = sum;
  }
}

}  // namespace moe_ext::cuda
