// The slots of a token and the sum of their rows, shared by dispatch, combine and experts.
//
// The CPU checks the indices. On CUDA, the caller must pass a valid permutation: a check would
// synchronize the host with the device.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>

#include "launch.cuh"

namespace moe_ext::cuda {

// Maps a token to its slots (K slots, or the slots between two offsets) and a slot to its row.
struct Slots {
  const int64_t* row_of;
  const int64_t* bounds;  // null: K slots each
  int64_t k;
  int64_t num_tokens;
  int64_t num_slots;

  __device__ int64_t begin(int64_t token) const { return bounds ? bounds[token] : token * k; }
  __device__ int64_t end(int64_t token) const { return begin(token + 1); }
  __device__ int64_t row(int64_t slot) const { return row_of[slot]; }
};

// Both tensors must come from contiguous_index and outlive the result.
inline Slots slots_of(const Tensor& inverse, const OptionalTensor& token_offsets) {
  return {.row_of = inverse.const_data_ptr<int64_t>(),
          .bounds = token_offsets ? token_offsets->const_data_ptr<int64_t>() : nullptr,
          .k = token_offsets ? 0 : inverse.size(1),
          .num_tokens = token_offsets ? token_offsets->numel() - 1 : inverse.size(0),
          .num_slots = inverse.numel()};
}

// Several elements that are read or written together.
template <typename scalar_t, int kSize>
struct alignas(sizeof(scalar_t) * kSize) Pack {
  scalar_t values[kSize];
};

// Calls body(std::integral_constant<int, n>). n is the number of elements in 16 bytes, or 1 if a
// row is not aligned to 16 bytes.
template <typename scalar_t, typename Body>
void with_pack_size(int64_t width, std::initializer_list<const void*> data, const Body& body) {
  constexpr int kSize = 16 / sizeof(scalar_t);
  bool aligned = width % kSize == 0;
  for (const void* each : data) aligned &= reinterpret_cast<uintptr_t>(each) % 16 == 0;
  if (aligned) {
    body(std::integral_constant<int, kSize>());
  } else {
    body(std::integral_constant<int, 1>());
  }
}

// Returns the grid for `num_threads` threads, with at most kMostBlocks blocks; kernels loop with
// the grid's stride.
inline dim3 strided_grid(int64_t num_threads) {
  constexpr int64_t kMostBlocks = 1 << 20;
  return grid(std::min(ceil_div(num_threads, kThreads), kMostBlocks));
}

// rows[slots.row(s)] = x[t] for the slots s of token t. A thread has some columns of one token.
template <typename Packed>
__global__ void rows_of_slots_kernel(const Packed* __restrict__ x, Slots slots, int64_t packs,
                                     Packed* __restrict__ rows) {
  const int64_t all = slots.num_tokens * packs;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < all;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t t = i / packs;
    const int64_t pack = i % packs;
    const Packed value = x[i];
    const int64_t end = slots.end(t);
    for (int64_t slot = slots.begin(t); slot < end; ++slot) {
      rows[slots.row(slot) * packs + pack] = value;
    }
  }
}

// Both tensors are contiguous.
inline void rows_of_slots(const Tensor& x, const Slots& slots, const Tensor& rows) {
  const int64_t width = x.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "dispatch", [&] {
    const auto* x_data = x.const_data_ptr<scalar_t>();
    auto* rows_data = rows.mutable_data_ptr<scalar_t>();
    with_pack_size<scalar_t>(width, {x_data, rows_data}, [&](auto size) {
      using Packed = Pack<scalar_t, size>;
      launch(rows_of_slots_kernel<Packed>, strided_grid(slots.num_tokens * (width / size)),
             kThreads, 0, reinterpret_cast<const Packed*>(x_data), slots, width / size,
             reinterpret_cast<Packed*>(rows_data));
    });
  });
}

// out[t] = sum of weights[s] * rows[slots.row(s)] over the slots s of token t, in order. Without
// weights, each weight is exactly 1. A thread has some columns of one token.
template <typename scalar_t, typename acc_t, int kSize>
__global__ void sum_of_rows_kernel(const scalar_t* __restrict__ rows,
                                   const acc_t* __restrict__ weights, Slots slots, int64_t width,
                                   scalar_t* __restrict__ out) {
  using Packed = Pack<scalar_t, kSize>;
  const int64_t packs = width / kSize;
  const int64_t all = slots.num_tokens * packs;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < all;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t t = i / packs;
    const int64_t pack = i % packs;
    acc_t sum[kSize] = {};
    const int64_t end = slots.end(t);
    for (int64_t slot = slots.begin(t); slot < end; ++slot) {
      const acc_t weight = weights != nullptr ? weights[slot] : acc_t(1);
      const Packed row = reinterpret_cast<const Packed*>(rows + slots.row(slot) * width)[pack];
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        sum[d] = std::fma(weight, static_cast<acc_t>(row.values[d]), sum[d]);
      }
    }
    Packed total;
#pragma unroll
    for (int d = 0; d < kSize; ++d) total.values[d] = static_cast<scalar_t>(sum[d]);
    reinterpret_cast<Packed*>(out + t * width)[pack] = total;
  }
}

// All tensors are contiguous; weights have the accumulation type of rows or are undefined.
inline void sum_of_rows(const Tensor& rows, const Slots& slots, const Tensor& weights,
                        const Tensor& sums) {
  const int64_t width = rows.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.scalar_type(), "sum_of_rows", [&] {
    using acc_t = at::opmath_type<scalar_t>;
    const auto* rows_data = rows.const_data_ptr<scalar_t>();
    const auto* weights_data = weights.defined() ? weights.const_data_ptr<acc_t>() : nullptr;
    auto* sums_data = sums.mutable_data_ptr<scalar_t>();
    with_pack_size<scalar_t>(width, {rows_data, sums_data}, [&](auto size) {
      launch(sum_of_rows_kernel<scalar_t, acc_t, size>,
             strided_grid(slots.num_tokens * (width / size)), kThreads, 0, rows_data, weights_data,
             slots, width, sums_data);
    });
  });
}

}  // namespace moe_ext::cuda
