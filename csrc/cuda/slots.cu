// The rows of slots, and their sums.
#include "../kernels/experts.h"
#include "../kernels/slots.h"
#include "vectors.cuh"

namespace moe_ext {
namespace cuda {
namespace {

// rows[slots.row(s)] = x[t] for the slots s of token t. A thread has some columns of one token.
template <typename Vec>
__global__ void rows_of_slots_kernel(const Vec* __restrict__ x, Slots slots, int64_t vectors,
                                     Vec* __restrict__ rows) {
  const int64_t all = slots.num_tokens * vectors;
  for (int64_t i = index_of_thread(); i < all; i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t t = i / vectors;
    const int64_t vector = i % vectors;
    const Vec value = x[i];
    const int64_t end = slots.end(t);
    for (int64_t slot = slots.begin(t); slot < end; ++slot) {
      rows[slots.row(slot) * vectors + vector] = value;
    }
  }
}

// out[t] = sum of weights[s] * (rows[slots.row(s)] + bias) over the slots s of token t, in order,
// with the bias of the row's group. Without weights, each weight is exactly 1; without a bias, it
// is 0. A thread has some columns of one token.
template <typename scalar_t, typename acc_t, int kSize>
__global__ void sum_of_rows_kernel(const scalar_t* __restrict__ rows,
                                   const scalar_t* __restrict__ bias, RowGroups groups,
                                   const acc_t* __restrict__ weights, Slots slots, int64_t width,
                                   scalar_t* __restrict__ out) {
  using Vec = Vector<scalar_t, kSize>;
  const int64_t vectors = width / kSize;
  const int64_t all = slots.num_tokens * vectors;
  for (int64_t i = index_of_thread(); i < all; i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t t = i / vectors;
    const int64_t vector = i % vectors;
    acc_t sum[kSize] = {};
    const int64_t end = slots.end(t);
    for (int64_t slot = slots.begin(t); slot < end; ++slot) {
      const acc_t weight = weights != nullptr ? weights[slot] : acc_t(1);
      const int64_t r = slots.row(slot);
      const Vec row = reinterpret_cast<const Vec*>(rows + r * width)[vector];
      Vec added = {};
      if (bias != nullptr) {
        added = reinterpret_cast<const Vec*>(bias + groups.group_of(r) * width)[vector];
      }
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        const acc_t value = static_cast<acc_t>(row.values[d]) + static_cast<acc_t>(added.values[d]);
        sum[d] = std::fma(weight, value, sum[d]);
      }
    }
    Vec total;
#pragma unroll
    for (int d = 0; d < kSize; ++d) total.values[d] = static_cast<scalar_t>(sum[d]);
    reinterpret_cast<Vec*>(out + t * width)[vector] = total;
  }
}

}  // namespace
}  // namespace cuda
using namespace cuda;

template <typename scalar_t>
void RowsOfSlots<scalar_t>::on_cuda(const CudaStream& stream) const {
  with_vector_size<scalar_t>(width, {x, rows}, [&](auto size) {
    using Vec = Vector<scalar_t, size>;
    launch_strided(stream, rows_of_slots_kernel<Vec>, slots.num_tokens * (width / size),
                   reinterpret_cast<const Vec*>(x), slots, width / size,
                   reinterpret_cast<Vec*>(rows));
  });
}
MOE_EXT_DEFINE_RUN_ON_CUDA(RowsOfSlots)

template <typename scalar_t>
void SumWithBias<scalar_t>::on_cuda(const CudaStream& stream) const {
  with_vector_size<scalar_t>(width, {rows, bias, sums}, [&](auto size) {
    launch_strided(stream, sum_of_rows_kernel<scalar_t, acc_type<scalar_t>, size>,
                   slots.num_tokens * (width / size), rows, bias, experts, gates, slots, width,
                   sums);
  });
}
MOE_EXT_DEFINE_RUN_ON_CUDA(SumWithBias)

template <typename scalar_t>
void SumOverSlots<scalar_t>::on_cuda(const CudaStream& stream) const {
  const SumWithBias<scalar_t> sum{.rows = rows,
                                  .bias = nullptr,
                                  .experts = {},
                                  .gates = weights,
                                  .slots = slots,
                                  .width = width,
                                  .sums = sums};
  sum.on_cuda(stream);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(SumOverSlots)

}  // namespace moe_ext
