// The grouped GEMMs of the experts: each expert's matrix with its rows. Only the device knows the
// number of rows.
//
//   rows times W:      out_r = a_r W_e + b_e      for the rows r of expert e; W may be transposed
//   rows times rows:   out_e = sum_r a_r^T g_r    exact zeros for an expert without rows
//
// Experts of equal size use torch's batched GEMM. In bfloat16, torch's grouped GEMM computes the
// others on the devices that have it, for up to 1023 experts. It is not used with a bias, which
// would be added after rounding. Other half-precision GEMMs use the tensor cores here if rows are
// aligned to 16 bytes. All remaining GEMMs use kernels that accumulate as the CPU does. Float32 is
// never TF32, because the difference of a logit and its threshold cancels.
#pragma once

#include <ATen/Context.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "../experts.h"
#include "packs.cuh"
#include "tensor_core.cuh"

namespace moe_ext::cuda {

constexpr int kTile = 64;           // rows and columns of a block's part of the result
constexpr int kDepth = 16;          // terms of the sum in one step
constexpr int kStride = kTile + 4;  // line stride in shared memory; avoids bank conflicts
constexpr int kSide = 16;           // a block has kSide^2 threads
constexpr int kEach = kTile / kSide;
constexpr int kLoads = kTile * kDepth / (kSide * kSide);  // per thread, factor and step
constexpr int kTerms = 256;  // summed separately: a single long sum would round away small terms

// A factor as in tensor_core.cuh, but of any type and alignment.
template <typename scalar_t, bool kAlong>
struct Factor {
  const scalar_t* data;  // at the first place of the block's part, first term
  int64_t stride;        // from one line to the next
  int64_t num_places;    // from the first place on

  // The place and term of this thread's i-th element; neighboring threads have neighbors in a line.
  static __device__ int place(int i) {
    const int number = threadIdx.x + i * kSide * kSide;
    return kAlong ? number / kDepth : number % kTile;
  }
  static __device__ int term(int i) {
    const int number = threadIdx.x + i * kSide * kSide;
    return kAlong ? number % kDepth : number / kTile;
  }

  // Loads kDepth terms from `first` on into registers; elements out of range are zero.
  __device__ void load(scalar_t (&numbers)[kLoads], int64_t first, int64_t num_terms) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool inside = first + term(i) < num_terms && place(i) < num_places;
      const int64_t line = kAlong ? place(i) : first + term(i);
      const int64_t along = kAlong ? first + term(i) : place(i);
      numbers[i] = inside ? data[line * stride + along] : scalar_t(0);
    }
  }

  template <typename acc_t>
  static __device__ void store(const scalar_t (&numbers)[kLoads], acc_t (*shared)[kStride]) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) shared[term(i)][place(i)] = static_cast<acc_t>(numbers[i]);
  }
};

// The result of a block's GEMM, in the registers of its threads.
template <typename acc_t>
struct TileProduct {
  acc_t total[kEach][kEach] = {};
  acc_t sum[kEach][kEach] = {};

  // Adds a times b. While one step is multiplied, the elements of the next step are loaded. All
  // threads of the block must call it.
  template <typename scalar_t, bool kAlongA, bool kAlongB>
  __device__ void add(const Factor<scalar_t, kAlongA>& a, const Factor<scalar_t, kAlongB>& b,
                      int64_t num_terms) {
    __shared__ acc_t a_tile[kDepth][kStride], b_tile[kDepth][kStride];
    scalar_t next_a[kLoads], next_b[kLoads];
    const auto load = [&](int64_t first) {
      a.load(next_a, first, num_terms);
      b.load(next_b, first, num_terms);
    };
    load(0);
    for (int64_t first = 0; first < num_terms; first += kDepth) {
      a.store(next_a, a_tile);
      b.store(next_b, b_tile);
      __syncthreads();
      // Elements past the end are zero. With a condition here, nvcc would load them after the
      // multiplication.
      load(first + kDepth);
      add_step(a_tile, b_tile);
      if ((first + kDepth) % kTerms == 0) finish_terms();
      __syncthreads();
    }
  }

  __device__ void add_step(const acc_t (*a_tile)[kStride], const acc_t (*b_tile)[kStride]) {
    const int row = threadIdx.x / kSide * kEach;
    const int column = threadIdx.x % kSide * kEach;
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      acc_t left[kEach], right[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        left[i] = a_tile[k][row + i];
        right[i] = b_tile[k][column + i];
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) sum[i][j] = std::fma(left[i], right[j], sum[i][j]);
      }
    }
  }

  __device__ void finish_terms() {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        total[i][j] += sum[i][j];
        sum[i][j] = 0;
      }
    }
  }

  // Calls write(row, column, value) for each element of this thread.
  template <typename Write>
  __device__ void for_each(const Write& write) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        write(static_cast<int>(threadIdx.x) / kSide * kEach + i,
              static_cast<int>(threadIdx.x) % kSide * kEach + j, total[i][j] + sum[i][j]);
      }
    }
  }
};

// Tiles of kSize rows, numbered such that no tile has rows of two experts: the tiles of expert e
// begin at number offsets[e] / kSize + e. At most one tile of each expert has no rows.
template <int kSize>
struct RowTile {
  int64_t expert;
  int64_t first_row;
  int64_t num_rows;  // of the expert, from first_row on; if <= 0, the tile is empty

  static int64_t count(int64_t num_rows, int64_t num_experts) {
    return num_rows / kSize + num_experts;
  }

  __device__ RowTile(const int64_t* offsets, int64_t num_experts, int64_t tile) {
    int64_t low = 0, high = num_experts;  // the last expert whose tiles begin at or before `tile`
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      if (offsets[middle] / kSize + middle <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    expert = low;
    const int64_t begin = offsets[expert];
    first_row = begin + (tile - (begin / kSize + expert)) * kSize;
    num_rows = offsets[expert + 1] - first_row;
  }
};

// out[r, n] = sum_k a[r, k] w[e, k, n] + bias[e, n]; with kTransposed, w[e, n, k].
template <typename scalar_t, typename acc_t, bool kTransposed>
__global__ void __launch_bounds__(kSide* kSide)
    rows_times_weights_kernel(const scalar_t* __restrict__ a, const scalar_t* __restrict__ w,
                              const scalar_t* __restrict__ bias,
                              const int64_t* __restrict__ offsets, int64_t num_experts,
                              int64_t depth, int64_t columns, int64_t column_tiles,
                              scalar_t* __restrict__ out) {
  const RowTile<kTile> tile(offsets, num_experts, blockIdx.x / column_tiles);
  if (tile.num_rows <= 0) return;  // uniform over the block
  const int64_t first_column = blockIdx.x % column_tiles * kTile;
  const Factor<scalar_t, true> rows{a + tile.first_row * depth, depth, tile.num_rows};
  const Factor<scalar_t, kTransposed> weight{
      w + tile.expert * depth * columns + first_column * (kTransposed ? depth : 1),
      kTransposed ? depth : columns, columns - first_column};
  TileProduct<acc_t> product;
  product.add(rows, weight, depth);
  product.for_each([&](int r, int n, acc_t value) {
    const int64_t column = first_column + n;
    if (r >= tile.num_rows || column >= columns) return;
    if (bias != nullptr) value += static_cast<acc_t>(bias[tile.expert * columns + column]);
    out[(tile.first_row + r) * columns + column] = static_cast<scalar_t>(value);
  });
}

// out[e, k, n] = sum of a[r, k] g[r, n] over the rows r of expert e.
template <typename scalar_t, typename acc_t>
__global__ void __launch_bounds__(kSide* kSide)
    rows_times_rows_kernel(const scalar_t* __restrict__ a, const scalar_t* __restrict__ g,
                           const int64_t* __restrict__ offsets, int64_t height, int64_t columns,
                           int64_t height_tiles, int64_t column_tiles, scalar_t* __restrict__ out) {
  const int64_t expert = blockIdx.x / (height_tiles * column_tiles);
  const int64_t first_k = blockIdx.x / column_tiles % height_tiles * kTile;
  const int64_t first_column = blockIdx.x % column_tiles * kTile;
  const int64_t begin = offsets[expert];
  const Factor<scalar_t, false> left{a + begin * height + first_k, height, height - first_k};
  const Factor<scalar_t, false> right{g + begin * columns + first_column, columns,
                                      columns - first_column};
  TileProduct<acc_t> product;
  product.add(left, right, offsets[expert + 1] - begin);
  product.for_each([&](int k, int n, acc_t value) {
    if (first_k + k >= height || first_column + n >= columns) return;
    out[(expert * height + first_k + k) * columns + first_column + n] =
        static_cast<scalar_t>(value);
  });
}

template <typename scalar_t, bool kTransposed>
__global__ void __launch_bounds__(tensor_core::kBlockThreads)
    rows_times_weights_tensor_core_kernel(const scalar_t* __restrict__ a,
                                          const scalar_t* __restrict__ w,
                                          const scalar_t* __restrict__ bias,
                                          const int64_t* __restrict__ offsets, int64_t num_experts,
                                          int64_t depth, int64_t columns, int64_t column_tiles,
                                          scalar_t* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared_space[];
  const RowTile<tensor_core::kTile> tile(offsets, num_experts, blockIdx.x / column_tiles);
  if (tile.num_rows <= 0) return;  // uniform over the block
  const int64_t first_column = blockIdx.x % column_tiles * tensor_core::kTile;
  const tensor_core::Factor<scalar_t, true> rows{a + tile.first_row * depth, depth, tile.num_rows};
  const tensor_core::Factor<scalar_t, kTransposed> weight{
      w + tile.expert * depth * columns + first_column * (kTransposed ? depth : 1),
      kTransposed ? depth : columns, columns - first_column};
  tensor_core::multiply(rows, weight, depth,
                        bias != nullptr ? bias + tile.expert * columns + first_column : nullptr,
                        out + tile.first_row * columns + first_column, columns, shared_space);
}

template <typename scalar_t>
__global__ void __launch_bounds__(tensor_core::kBlockThreads)
    rows_times_rows_tensor_core_kernel(const scalar_t* __restrict__ a,
                                       const scalar_t* __restrict__ g,
                                       const int64_t* __restrict__ offsets, int64_t height,
                                       int64_t columns, int64_t height_tiles, int64_t column_tiles,
                                       scalar_t* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared_space[];
  const int64_t expert = blockIdx.x / (height_tiles * column_tiles);
  const int64_t first_k = blockIdx.x / column_tiles % height_tiles * tensor_core::kTile;
  const int64_t first_column = blockIdx.x % column_tiles * tensor_core::kTile;
  const int64_t begin = offsets[expert];
  const tensor_core::Factor<scalar_t, false> left{a + begin * height + first_k, height,
                                                  height - first_k};
  const tensor_core::Factor<scalar_t, false> right{g + begin * columns + first_column, columns,
                                                   columns - first_column};
  tensor_core::multiply(
      left, right, offsets[expert + 1] - begin, static_cast<const scalar_t*>(nullptr),
      out + (expert * height + first_k) * columns + first_column, columns, shared_space);
}

// Writes zeros for the experts without rows to out [E, size]: torch's grouped GEMM leaves them
// unwritten on some devices. A Pack whose bytes are all 0 has elements 0. Each expert has several
// blocks.
template <typename Packed>
__global__ void zero_unused_kernel(const int64_t* __restrict__ offsets, int64_t size,
                                   int64_t blocks_of_each, Packed* __restrict__ out) {
  const int64_t expert = blockIdx.x / blocks_of_each;
  if (offsets[expert] != offsets[expert + 1]) return;  // uniform over the block
  for (int64_t i = blockIdx.x % blocks_of_each * blockDim.x + threadIdx.x; i < size;
       i += blocks_of_each * blockDim.x) {
    out[expert * size + i] = Packed{};
  }
}

// The grouped GEMMs of rows that are ordered by expert. All tensors are contiguous, but w may also
// be transposed (see experts.h).
class GroupedProducts {
 public:
  // offsets [E + 1] on the device; undefined if all experts have R / E rows.
  GroupedProducts(Tensor offsets, int64_t num_rows, int64_t num_experts)
      : offsets_(std::move(offsets)), num_rows_(num_rows), num_experts_(num_experts) {}

  // Returns a [R, K] times w [E, K, N], plus bias [E, N] if it is defined: [R, N].
  Tensor times_weights(const Tensor& a, const Tensor& w, const Tensor& bias = {}) const {
    if (!offsets_.defined()) {
      const Tensor rows = by_expert(a);
      return (bias.defined() ? at::baddbmm(bias.unsqueeze(1), rows, w) : at::bmm(rows, w))
          .view({num_rows_, w.size(2)});
    }
    if (!bias.defined() && torch_takes(a, w)) return at::_grouped_mm(a, w, ends());
    if (is_transposed(w)) return launch_times_weights</*kTransposed=*/true>(a, w, bias);
    return launch_times_weights</*kTransposed=*/false>(a, w, bias);
  }

  // Returns the transposed a [R, K] times g [R, N] for each expert: [E, K, N].
  Tensor of_rows(const Tensor& a, const Tensor& g) const {
    const int64_t height = a.size(1), columns = g.size(1);
    if (!offsets_.defined()) return at::bmm(by_expert(a).transpose(1, 2), by_expert(g));
    const int64_t* offsets = offsets_.const_data_ptr<int64_t>();
    if (torch_takes(a, g)) {
      Tensor out = at::_grouped_mm(a.t(), g, ends());
      using Packed = Pack<at::BFloat16, tensor_core::kChunk>;
      // The matrix of a single expert can occupy the whole device.
      constexpr int64_t kMostBlocks = 64, kPacks = 4;  // per expert; per thread
      const int64_t size = height * columns / tensor_core::kChunk;
      const int64_t blocks_of_each = std::min(kMostBlocks, ceil_div(size, kPacks * kThreads));
      launch(zero_unused_kernel<Packed>, grid(num_experts_ * blocks_of_each), kThreads, 0, offsets,
             size, blocks_of_each, reinterpret_cast<Packed*>(out.mutable_data_ptr<at::BFloat16>()));
      return out;
    }
    Tensor out = at::empty({num_experts_, height, columns}, a.options());
    const auto start = [&](auto kernel, int tile, int threads, int64_t shared_bytes, auto scalar) {
      using scalar_t = decltype(scalar);
      const int64_t height_tiles = ceil_div(height, tile), column_tiles = ceil_div(columns, tile);
      launch(kernel, grid(num_experts_ * height_tiles * column_tiles), threads, shared_bytes,
             a.const_data_ptr<scalar_t>(), g.const_data_ptr<scalar_t>(), offsets, height, columns,
             height_tiles, column_tiles, out.mutable_data_ptr<scalar_t>());
    };
    if (tensor_cores_take(a, g)) {
      AT_DISPATCH_REDUCED_FLOATING_TYPES(a.scalar_type(), "experts", [&] {
        start(rows_times_rows_tensor_core_kernel<scalar_t>, tensor_core::kTile,
              tensor_core::kBlockThreads, tensor_core::kSharedBytes<false, false>, scalar_t());
      });
      return out;
    }
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, a.scalar_type(), "experts", [&] {
      start(rows_times_rows_kernel<scalar_t, at::opmath_type<scalar_t>>, kTile, kSide * kSide, 0,
            scalar_t());
    });
    return out;
  }

 private:
  Tensor by_expert(const Tensor& rows) const {
    return rows.view({num_experts_, num_rows_ / num_experts_, rows.size(1)});
  }

  // offsets[1:] as int32 for torch's grouped GEMM, computed at the first use.
  const Tensor& ends() const {
    if (!ends_.defined()) ends_ = offsets_.slice(0, 1).to(at::kInt);
    return ends_;
  }

  // Returns whether both are half precision in rows of whole 16-byte chunks, aligned to 16 bytes. A
  // single row or matrix is contiguous with any stride, but torch checks the stride.
  static bool tensor_cores_take(const Tensor& one, const Tensor& other) {
    const auto fits = [](const Tensor& matrices) {
      bool fits = reinterpret_cast<uintptr_t>(matrices.const_data_ptr()) % 16 == 0;
      for (int64_t d = 1; d < matrices.dim(); ++d)
        fits &= matrices.size(d) % tensor_core::kChunk == 0;
      return fits && (matrices.dim() == 2 ? matrices.stride(0) == matrices.size(1)
                                          : matrices.stride(0) % tensor_core::kChunk == 0);
    };
    return at::isReducedFloatingType(one.scalar_type()) && fits(one) && fits(other);
  }

  bool torch_takes(const Tensor& one, const Tensor& other) const {
    constexpr int64_t kMostExperts = 1023, kMostRows = INT32_MAX;
    const int major = at::cuda::getCurrentDeviceProperties()->major;
    return one.scalar_type() == at::kBFloat16 && (major == 9 || major == 10) && one.numel() > 0 &&
           other.numel() > 0 && num_rows_ <= kMostRows && num_experts_ <= kMostExperts &&
           tensor_cores_take(one, other);
  }

  template <bool kTransposed>
  Tensor launch_times_weights(const Tensor& a, const Tensor& w, const Tensor& bias) const {
    const int64_t depth = w.size(1), columns = w.size(2);
    Tensor out = at::empty({num_rows_, columns}, a.options());
    const auto start = [&](auto kernel, int64_t row_tiles, int tile, int threads,
                           int64_t shared_bytes, auto scalar) {
      using scalar_t = decltype(scalar);
      const int64_t column_tiles = ceil_div(columns, tile);
      launch(kernel, grid(row_tiles * column_tiles), threads, shared_bytes,
             a.const_data_ptr<scalar_t>(), w.const_data_ptr<scalar_t>(),
             bias.defined() ? bias.const_data_ptr<scalar_t>() : nullptr,
             offsets_.const_data_ptr<int64_t>(), num_experts_, depth, columns, column_tiles,
             out.mutable_data_ptr<scalar_t>());
    };
    if (tensor_cores_take(a, w)) {
      AT_DISPATCH_REDUCED_FLOATING_TYPES(a.scalar_type(), "experts", [&] {
        start(rows_times_weights_tensor_core_kernel<scalar_t, kTransposed>,
              RowTile<tensor_core::kTile>::count(num_rows_, num_experts_), tensor_core::kTile,
              tensor_core::kBlockThreads, tensor_core::kSharedBytes<true, kTransposed>, scalar_t());
      });
      return out;
    }
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, a.scalar_type(), "experts", [&] {
      start(rows_times_weights_kernel<scalar_t, at::opmath_type<scalar_t>, kTransposed>,
            RowTile<kTile>::count(num_rows_, num_experts_), kTile, kSide * kSide, 0, scalar_t());
    });
    return out;
  }

  at::NoTF32Guard no_tf32_;
  Tensor offsets_;
  mutable Tensor ends_;
  int64_t num_rows_, num_experts_;
};

}  // namespace moe_ext::cuda
