// Importance(X) = sum_x G(x) (Eq. 6) and the exact load on CUDA.

#include <algorithm>

#include "../kernels/importance.h"
#include "chunks.cuh"

namespace moe_ext {
namespace cuda {
namespace {

constexpr int kTile = 4096;  // experts of a block; their sums are in shared memory

// Sums the gates of a chunk of the slots for kTile experts; without gates, counts the slots. A
// block is one warp; each lane owns every kWarp-th expert and adds in slot order.
template <typename scalar_t, typename acc_t>
__global__ void partial_importance_kernel(const scalar_t* __restrict__ gates,
                                          const int64_t* __restrict__ expert_index,
                                          int64_t num_slots, int64_t num_experts, int64_t tiles,
                                          int64_t chunk_size,
                                          acc_t* __restrict__ partial_importance) {
  extern __shared__ __align__(16) unsigned char shared_space[];
  auto* sum = reinterpret_cast<acc_t*>(shared_space);
  const int lane = threadIdx.x;
  const int64_t chunk = blockIdx.x / tiles;
  const int64_t first_expert = blockIdx.x % tiles * kTile;
  const int64_t size = std::min<int64_t>(kTile, num_experts - first_expert);
  const int64_t end = std::min(num_slots, (chunk + 1) * chunk_size);
  for (int64_t i = lane; i < size; i += kWarp) sum[i] = 0;
  for (int64_t first = chunk * chunk_size; first < end; first += kWarp) {
    int mine = -1;  // index of the slot's expert in the tile, or -1
    acc_t gate = 0;
    if (const int64_t slot = first + lane; slot < end) {
      const int64_t place = expert_index[slot] - first_expert;
      if (place >= 0 && place < size) mine = static_cast<int>(place);
      gate = gates == nullptr ? acc_t(1) : static_cast<acc_t>(gates[slot]);
    }
    for (int l = 0; l < kWarp; ++l) {
      const int place = __shfl_sync(kAllLanes, mine, l);
      const acc_t to_add = __shfl_sync(kAllLanes, gate, l);
      if (place % kWarp == lane) sum[place] += to_add;
    }
  }
  for (int64_t i = lane; i < size; i += kWarp) {
    partial_importance[chunk * num_experts + first_expert + i] = sum[i];
  }
}

}  // namespace
}  // namespace cuda
using namespace cuda;

template <typename scalar_t>
void Importance<scalar_t>::on_cuda(const CudaStream& stream) const {
  using acc_t = acc_type<scalar_t>;
  const int64_t num_slots = num_tokens * k;
  // Enough chunks to keep the device busy, and few enough to be summed quickly.
  constexpr int64_t kLeastChunk = 128, kMostChunks = 1024, kMostSums = 1 << 23;
  const int64_t chunk_size = std::max({kLeastChunk, ceil_div(num_slots, kMostChunks),
                                       ceil_div(num_slots * num_experts, kMostSums)});
  const int64_t num_chunks = ceil_div(num_slots, chunk_size);
  const int64_t tiles = ceil_div(num_experts, kTile);
  auto* partial_sums = stream.take<acc_t>(num_chunks * num_experts);
  launch(stream, partial_importance_kernel<scalar_t, acc_t>, num_chunks * tiles, kWarp,
         std::min<int64_t>(kTile, num_experts) * sizeof(acc_t), gates, expert_index, num_slots,
         num_experts, tiles, chunk_size, partial_sums);
  launch_blocks(stream, sum_of_chunks_kernel<acc_t>, ceil_div(num_experts, kWarp), partial_sums,
                num_experts, RowGroups{.bounds = nullptr, .num_groups = 1, .num_rows = num_slots},
                chunk_size, importance);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(Importance)

}  // namespace moe_ext
