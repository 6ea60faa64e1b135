// Importance(X) = sum_x G(x) (Eq. 6) and the exact load on CUDA.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "../implement.h"
#include "../importance.h"
#include "chunks.cuh"

namespace moe_ext::cuda {
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

// Returns the importance [E], or the load without gates; index is contiguous, [T, K].
template <typename scalar_t>
Tensor sum_of_slots(const scalar_t* gates, const Tensor& index, int64_t num_experts, Tensor sum) {
  using acc_t = at::opmath_type<scalar_t>;
  const int64_t num_slots = index.numel();
  // Enough chunks to keep the device busy, and few enough to be summed quickly.
  constexpr int64_t kLeastChunk = 128, kMostChunks = 1024, kMostSums = 1 << 23;
  const int64_t chunk_size = std::max({kLeastChunk, ceil_div(num_slots, kMostChunks),
                                       ceil_div(num_slots * num_experts, kMostSums)});
  const int64_t num_chunks = ceil_div(num_slots, chunk_size);
  const int64_t tiles = ceil_div(num_experts, kTile);
  const Tensor partial_sums = at::empty({num_chunks, num_experts}, sum.options());
  launch(partial_importance_kernel<scalar_t, acc_t>, grid(num_chunks * tiles), kWarp,
         std::min<int64_t>(kTile, num_experts) * sizeof(acc_t), gates,
         index.const_data_ptr<int64_t>(), num_slots, num_experts, tiles, chunk_size,
         partial_sums.mutable_data_ptr<acc_t>());
  launch(sum_of_chunks_kernel<acc_t>, grid(ceil_div(num_experts, kWarp)), kThreads, 0,
         partial_sums.const_data_ptr<acc_t>(), num_experts,
         Groups{.bounds = nullptr, .num_groups = 1, .num_rows = num_slots}, chunk_size,
         sum.mutable_data_ptr<acc_t>());
  return sum;
}

Tensor importance_cuda(const Tensor& gates, const Tensor& expert_index, int64_t num_experts) {
  check_importance("importance", gates, expert_index, num_experts);
  const c10::cuda::OptionalCUDAGuard guard(gates.device());
  const Tensor kept = gates.contiguous();
  return AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, kept.scalar_type(), "importance", [&] {
        return sum_of_slots(kept.const_data_ptr<scalar_t>(), contiguous_index(expert_index),
                            num_experts, importance_output(empty, gates, num_experts));
      });
}

std::tuple<Tensor, Tensor> importance_and_load_cuda(const Tensor& gates, const Tensor& expert_index,
                                                    int64_t num_experts) {
  check_importance("importance_and_load", gates, expert_index, num_experts);
  const c10::cuda::OptionalCUDAGuard guard(gates.device());
  const Tensor kept = gates.contiguous();
  const Tensor index = contiguous_index(expert_index);
  return AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, kept.scalar_type(), "importance_and_load", [&] {
        const auto sum = [&](const scalar_t* gates_data) {
          return sum_of_slots(gates_data, index, num_experts,
                              importance_output(empty, gates, num_experts));
        };
        return std::tuple(sum(kept.const_data_ptr<scalar_t>()), sum(nullptr));
      });
}

}  // namespace
}  // namespace moe_ext::cuda

TORCH_LIBRARY_IMPL(moe_ext, CUDA, m) {
  moe_ext::implement<"importance", &moe_ext::cuda::importance_cuda>(m);
  moe_ext::implement<"importance_and_load", &moe_ext::cuda::importance_and_load_cuda>(m);
}
