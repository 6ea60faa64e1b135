// The products of the experts: each expert's matrix with its rows, whose numbers only the device
// knows.
//
//   rows times W:      out_r = a_r W_e + b_e      for the rows r of expert e
//   rows times W^T:    out_r = g_r W_e^T
//   rows times rows:   out_e = sum_r a_r^T g_r    exact zeros for an expert without rows
//
// Experts of equal size are a batch of products, torch's. In bfloat16 torch's grouped product does
// the others on the devices that have it; else the kernels here, which accumulate as the CPU's do.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/add.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/diff.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/repeat_interleave.h>

#include <algorithm>

#include "launch.cuh"

namespace moe_ext::cuda {

constexpr int kTile = 64;   // rows and columns of a block's part of the result
constexpr int kDepth = 16;  // of the factors' parts in shared memory
constexpr int kSide = 16;   // kSide^2 threads
constexpr int kEach = kTile / kSide;

// One block's factors in shared memory, and the product of them in its threads' registers.
template <typename acc_t>
struct TileProduct {
  acc_t (*a)[kTile];  // [kDepth][kTile], shared
  acc_t (*b)[kTile];
  acc_t sum[kEach][kEach] = {};

  __device__ void add_product() {
    const int row = threadIdx.x / kSide * kEach;
    const int column = threadIdx.x % kSide * kEach;
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      acc_t left[kEach], right[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        left[i] = a[k][row + i];
        right[i] = b[k][column + i];
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) sum[i][j] = std::fma(left[i], right[j], sum[i][j]);
      }
    }
  }

  // Calls write(row, column, value) for this thread's part.
  template <typename Write>
  __device__ void for_each(const Write& write) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        write(static_cast<int>(threadIdx.x) / kSide * kEach + i,
              static_cast<int>(threadIdx.x) % kSide * kEach + j, sum[i][j]);
      }
    }
  }
};

// Tiles of rows are numbered so that none has rows of two experts: those of expert e are the ones
// from offsets[e] / kTile + e on. That leaves at most one tile of each expert without rows.
inline int64_t num_row_tiles(int64_t num_rows, int64_t num_experts) {
  return num_rows / kTile + num_experts;
}

// The expert of a tile: the last one with offsets[e] / kTile + e <= tile.
__device__ inline int64_t expert_of_tile(const int64_t* offsets, int64_t num_experts,
                                         int64_t tile) {
  int64_t low = 0, high = num_experts;  // it is in [low, high)
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (offsets[middle] / kTile + middle <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// out[r, n] = sum_k a[r, k] w[e, k, n] + bias[e, n]; with kTransposed, w[e, n, k].
template <typename scalar_t, typename acc_t, bool kTransposed>
__global__ void __launch_bounds__(kSide* kSide)
    rows_times_weights_kernel(const scalar_t* __restrict__ a, const scalar_t* __restrict__ w,
                              const scalar_t* __restrict__ bias,
                              const int64_t* __restrict__ offsets, int64_t num_experts,
                              int64_t depth, int64_t columns, int64_t column_tiles,
                              scalar_t* __restrict__ out) {
  __shared__ acc_t a_tile[kDepth][kTile], b_tile[kDepth][kTile];
  const int64_t row_tile = blockIdx.x / column_tiles;
  const int64_t first_column = blockIdx.x % column_tiles * kTile;
  const int64_t expert = expert_of_tile(offsets, num_experts, row_tile);
  const int64_t begin = offsets[expert];
  const int64_t first_row = begin + (row_tile - (begin / kTile + expert)) * kTile;
  const int64_t num_rows = min(static_cast<int64_t>(kTile), offsets[expert + 1] - first_row);
  if (num_rows <= 0) return;  // the whole block
  const scalar_t* weight = w + expert * depth * columns;
  TileProduct<acc_t> product{a_tile, b_tile};
  for (int64_t k0 = 0; k0 < depth; k0 += kDepth) {
    for (int i = threadIdx.x; i < kDepth * kTile; i += kSide * kSide) {
      // Neighbouring threads read neighbouring numbers: along k in a row, along n in a matrix.
      const int r = i / kDepth, k = i % kDepth;
      const bool inside = r < num_rows && k0 + k < depth;
      a_tile[k][r] = inside ? static_cast<acc_t>(a[(first_row + r) * depth + k0 + k]) : acc_t(0);
      const int n = kTransposed ? i / kDepth : i % kTile;
      const int kb = kTransposed ? i % kDepth : i / kTile;
      const int64_t column = first_column + n;
      const bool there = column < columns && k0 + kb < depth;
      const int64_t at = kTransposed ? column * depth + k0 + kb : (k0 + kb) * columns + column;
      b_tile[kb][n] = there ? static_cast<acc_t>(weight[at]) : acc_t(0);
    }
    __syncthreads();
    product.add_product();
    __syncthreads();
  }
  product.for_each([&](int r, int n, acc_t value) {
    const int64_t column = first_column + n;
    if (r >= num_rows || column >= columns) return;
    if (bias != nullptr) value += static_cast<acc_t>(bias[expert * columns + column]);
    out[(first_row + r) * columns + column] = static_cast<scalar_t>(value);
  });
}

// out[e, k, n] = sum of a[r, k] g[r, n] over the rows r of expert e.
template <typename scalar_t, typename acc_t>
__global__ void __launch_bounds__(kSide* kSide)
    rows_times_rows_kernel(const scalar_t* __restrict__ a, const scalar_t* __restrict__ g,
                           const int64_t* __restrict__ offsets, int64_t height, int64_t columns,
                           int64_t height_tiles, int64_t column_tiles, scalar_t* __restrict__ out) {
  __shared__ acc_t a_tile[kDepth][kTile], b_tile[kDepth][kTile];
  const int64_t expert = blockIdx.x / (height_tiles * column_tiles);
  const int64_t first_k = blockIdx.x / column_tiles % height_tiles * kTile;
  const int64_t first_column = blockIdx.x % column_tiles * kTile;
  const int64_t end = offsets[expert + 1];
  TileProduct<acc_t> product{a_tile, b_tile};
  for (int64_t row0 = offsets[expert]; row0 < end; row0 += kDepth) {
    for (int i = threadIdx.x; i < kDepth * kTile; i += kSide * kSide) {
      const int r = i / kTile, c = i % kTile;
      const int64_t row = row0 + r;
      const bool k_inside = row < end && first_k + c < height;
      a_tile[r][c] = k_inside ? static_cast<acc_t>(a[row * height + first_k + c]) : acc_t(0);
      const bool n_inside = row < end && first_column + c < columns;
      b_tile[r][c] = n_inside ? static_cast<acc_t>(g[row * columns + first_column + c]) : acc_t(0);
    }
    __syncthreads();
    product.add_product();
    __syncthreads();
  }
  product.for_each([&](int k, int n, acc_t value) {
    if (first_k + k >= height || first_column + n >= columns) return;
    out[(expert * height + first_k + k) * columns + first_column + n] =
        static_cast<scalar_t>(value);
  });
}

// The products of rows that are ordered by expert; all tensors are contiguous.
class GroupedProducts {
 public:
  // offsets [E + 1] on the device; undefined: all experts have R / E rows.
  GroupedProducts(Tensor offsets, int64_t num_rows, int64_t num_experts)
      : offsets_(std::move(offsets)), num_rows_(num_rows), num_experts_(num_experts) {
    if (offsets_.defined()) ends_ = offsets_.slice(0, 1).to(at::kInt);
  }

  // a [R, K] times w [E, K, N], plus bias [E, N] where it is defined: [R, N].
  Tensor forward(const Tensor& a, const Tensor& w, const Tensor& bias) const {
    if (!offsets_.defined()) {
      const Tensor rows = by_expert(a);
      return (bias.defined() ? at::baddbmm(bias.unsqueeze(1), rows, w) : at::bmm(rows, w))
          .view({num_rows_, w.size(2)});
    }
    if (!is_fast(a, w.size(1), w.size(2))) {
      return times_weights</*kTransposed=*/false>(a, w, bias);
    }
    const Tensor out = at::_grouped_mm(a, w, ends_);
    if (!bias.defined()) return out;
    return at::add(out, at::repeat_interleave(bias, at::diff(offsets_), 0, num_rows_));
  }

  // g [R, N] times the transposed w [E, K, N]: [R, K].
  Tensor transposed(const Tensor& g, const Tensor& w) const {
    if (!offsets_.defined()) {
      return at::bmm(by_expert(g), w.transpose(1, 2)).view({num_rows_, w.size(1)});
    }
    if (is_fast(g, w.size(1), w.size(2))) return at::_grouped_mm(g, w.transpose(1, 2), ends_);
    return times_weights</*kTransposed=*/true>(g, w, Tensor());
  }

  // a [R, K] transposed times g [R, N], expert by expert: [E, K, N].
  Tensor of_rows(const Tensor& a, const Tensor& g) const {
    const int64_t height = a.size(1), columns = g.size(1);
    if (!offsets_.defined()) return at::bmm(by_expert(a).transpose(1, 2), by_expert(g));
    if (is_fast(a, height, columns)) return at::_grouped_mm(a.t(), g, ends_);
    Tensor out = at::empty({num_experts_, height, columns}, a.options());
    const int64_t height_tiles = ceil_div(height, kTile), column_tiles = ceil_div(columns, kTile);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, a.scalar_type(), "experts", [&] {
      using acc_t = at::opmath_type<scalar_t>;
      launch(rows_times_rows_kernel<scalar_t, acc_t>,
             grid(num_experts_ * height_tiles * column_tiles), kSide * kSide, 0,
             a.const_data_ptr<scalar_t>(), g.const_data_ptr<scalar_t>(),
             offsets_.const_data_ptr<int64_t>(), height, columns, height_tiles, column_tiles,
             out.mutable_data_ptr<scalar_t>());
    });
    return out;
  }

 private:
  Tensor by_expert(const Tensor& rows) const {
    return rows.view({num_experts_, num_rows_ / num_experts_, rows.size(1)});
  }

  // Whether torch's grouped product takes these: it wants rows that begin on 16 bytes.
  bool is_fast(const Tensor& rows, int64_t height, int64_t columns) const {
    const int major = at::cuda::getCurrentDeviceProperties()->major;
    return rows.scalar_type() == at::kBFloat16 && (major == 9 || major == 10) && num_rows_ > 0 &&
           height % 8 == 0 && columns % 8 == 0;
  }

  template <bool kTransposed>
  Tensor times_weights(const Tensor& a, const Tensor& w, const Tensor& bias) const {
    const int64_t depth = w.size(kTransposed ? 2 : 1), columns = w.size(kTransposed ? 1 : 2);
    Tensor out = at::empty({num_rows_, columns}, a.options());
    const int64_t column_tiles = ceil_div(columns, kTile);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, a.scalar_type(), "experts", [&] {
      using acc_t = at::opmath_type<scalar_t>;
      launch(rows_times_weights_kernel<scalar_t, acc_t, kTransposed>,
             grid(num_row_tiles(num_rows_, num_experts_) * column_tiles), kSide * kSide, 0,
             a.const_data_ptr<scalar_t>(), w.const_data_ptr<scalar_t>(),
             bias.defined() ? bias.const_data_ptr<scalar_t>() : nullptr,
             offsets_.const_data_ptr<int64_t>(), num_experts_, depth, columns, column_tiles,
             out.mutable_data_ptr<scalar_t>());
    });
    return out;
  }

  Tensor offsets_, ends_;
  int64_t num_rows_, num_experts_;
};

}  // namespace moe_ext::cuda
