// The dispatch plan (a stable sort of the slots by expert) and the gather of the rows.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "../kernels/dispatch.h"
#include "packs.cuh"

namespace moe_ext {
namespace cuda {
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

}  // namespace
}  // namespace cuda
using namespace cuda;

// The sort is stable, so the result is unique.
void DispatchPlan::on_cuda() const {
  const auto options = on_this_device(at::kLong);
  const Tensor sorted = at::empty({num_rows}, options);
  if (num_rows > 0) {
    const Tensor slots = at::arange(num_rows, options);
    const int num_bits = std::bit_width(static_cast<uint64_t>(num_experts - 1));
    size_t num_bytes = 0;
    const auto sort = [&](void* space) {
      C10_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(
          space, num_bytes, expert_index, sorted.mutable_data_ptr<int64_t>(),
          slots.const_data_ptr<int64_t>(), permutation, num_rows,
          /*begin_bit=*/0, /*end_bit=*/std::max(1, num_bits), at::cuda::getCurrentCUDAStream()));
    };
    sort(nullptr);  // returns the required number of bytes
    const Tensor space = at::empty({static_cast<int64_t>(num_bytes)}, on_this_device(at::kByte));
    sort(space.mutable_data_ptr());
  }
  launch(plan_kernel, grid(ceil_div(std::max(num_rows, num_experts + 1), kThreads)), kThreads, 0,
         sorted.const_data_ptr<int64_t>(), permutation, num_rows, num_experts, inverse,
         tokens_per_expert, offsets);
}

}  // namespace moe_ext
