// The dispatch plan (a stable sort of the slots by expert) and the gather of the rows.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cub/device/device_radix_sort.cuh>

#include "../kernels/dispatch.h"
#include "vectors.cuh"

namespace moe_ext {
namespace cuda {
namespace {

// Numbers the slots.
__global__ void slots_kernel(int64_t num_slots, int64_t* __restrict__ slots) {
  const int64_t i = index_of_thread();
  if (i < num_slots) slots[i] = i;
}

// From the sorted experts of the rows, computes the inverse permutation and offsets[e], the first
// row whose expert is e or later. One thread per row and per expert.
__global__ void plan_kernel(const int64_t* __restrict__ sorted,
                            const int64_t* __restrict__ permutation, int64_t num_rows,
                            int64_t num_experts, int64_t* __restrict__ inverse,
                            int64_t* __restrict__ tokens_per_expert,
                            int64_t* __restrict__ offsets) {
  const int64_t i = index_of_thread();
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
void DispatchPlan::on_cuda(const CudaStream& stream) const {
  auto* sorted = stream.take<int64_t>(num_rows);
  if (num_rows > 0) {
    auto* slots = stream.take<int64_t>(num_rows);
    launch_threads(stream, slots_kernel, num_rows, num_rows, slots);
    const int num_bits = std::bit_width(static_cast<uint64_t>(num_experts - 1));
    size_t num_bytes = 0;
    const auto sort = [&](void* space) {
      check(cub::DeviceRadixSort::SortPairs(
          space, num_bytes, expert_index, sorted, slots, permutation, num_rows, /*begin_bit=*/0,
          /*end_bit=*/std::max(1, num_bits), static_cast<cudaStream_t>(stream.handle)));
    };
    sort(nullptr);  // returns the required number of bytes
    sort(stream.take<std::byte>(static_cast<int64_t>(num_bytes)));
  }
  launch_threads(stream, plan_kernel, std::max(num_rows, num_experts + 1), sorted, permutation,
                 num_rows, num_experts, inverse, tokens_per_expert, offsets);
}
MOE_EXT_DEFINE_ON_CUDA(DispatchPlan)

}  // namespace moe_ext
