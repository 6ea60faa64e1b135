// The grouped GEMMs of the experts on CUDA.
//
// Half precision uses the tensor cores if the lines of both operands are aligned to 16 bytes. All
// other GEMMs accumulate as the CPU does. Float32 is never TF32, because the difference of a logit
// and its threshold cancels.
#include <algorithm>
#include <initializer_list>

#include "../kernels/grouped_gemm.h"
#include "simt.cuh"
#include "tensor_core.cuh"
#include "vectors.cuh"

namespace moe_ext {
namespace cuda {
namespace {

// Tiles of kSize rows, numbered such that no tile has rows of two experts: the tiles of expert e
// begin at number bounds[e] / kSize + e. At most one tile of each expert has no rows.
template <int kSize>
struct RowTile {
  int64_t expert;
  int64_t first_row;
  int64_t num_rows;  // of the expert, from first_row on; if <= 0, the tile is empty

  static int64_t count(const RowGroups& experts) {
    return experts.num_rows / kSize + experts.num_groups;
  }

  __device__ RowTile(const RowGroups& experts, int64_t tile) {
    int64_t low = 0, high = experts.num_groups;
    // The last expert whose tiles begin at or before `tile`.
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      if (experts.bounds[middle] / kSize + middle <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    expert = low;
    const int64_t begin = experts.bounds[expert];
    first_row = begin + (tile - (begin / kSize + expert)) * kSize;
    num_rows = experts.bounds[expert + 1] - first_row;
  }
};

// The block's columns of an expert's weight, from first_column on.
template <template <typename, bool> typename Operand, bool kTransposed, typename scalar_t>
__device__ __forceinline__ Operand<scalar_t, kTransposed> operand_of_weight(const scalar_t* weight,
                                                                            int64_t expert,
                                                                            int64_t k, int64_t n,
                                                                            int64_t first_column) {
  return {weight + expert * k * n + first_column * (kTransposed ? k : 1), kTransposed ? k : n,
          n - first_column};
}

template <bool kTransposed, typename scalar_t>
__global__ void __launch_bounds__(simt::kBlockThreads)
    rows_times_weights_kernel(const scalar_t* __restrict__ a, const scalar_t* __restrict__ weight,
                              const scalar_t* __restrict__ bias, RowGroups experts, int64_t k,
                              int64_t n, int64_t column_tiles, scalar_t* __restrict__ out) {
  using acc_t = acc_type<scalar_t>;
  const RowTile<simt::kBlockTile> tile(experts, blockIdx.x / column_tiles);
  if (tile.num_rows <= 0) return;  // uniform over the block
  const int64_t first_column = blockIdx.x % column_tiles * simt::kBlockTile;
  const simt::Operand<scalar_t, true> rows{a + tile.first_row * k, k, tile.num_rows};
  simt::Accumulators<acc_t> accumulators;
  accumulators.mainloop(
      rows, operand_of_weight<simt::Operand, kTransposed>(weight, tile.expert, k, n, first_column),
      k);
  accumulators.epilogue([&](int row, int column_of_tile, acc_t value) {
    const int64_t column = first_column + column_of_tile;
    if (row >= tile.num_rows || column >= n) return;
    if (bias != nullptr) value += static_cast<acc_t>(bias[tile.expert * n + column]);
    out[(tile.first_row + row) * n + column] = static_cast<scalar_t>(value);
  });
}

template <bool kTransposed, typename scalar_t>
__global__ void __launch_bounds__(tensor_core::kBlockThreads)
    rows_times_weights_tensor_core_kernel(const scalar_t* __restrict__ a,
                                          const scalar_t* __restrict__ weight,
                                          const scalar_t* __restrict__ bias, RowGroups experts,
                                          int64_t k, int64_t n, int64_t column_tiles,
                                          scalar_t* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared_space[];
  const RowTile<tensor_core::kBlockTile> tile(experts, blockIdx.x / column_tiles);
  if (tile.num_rows <= 0) return;  // uniform over the block
  const int64_t first_column = blockIdx.x % column_tiles * tensor_core::kBlockTile;
  const tensor_core::Operand<scalar_t, true> rows{a + tile.first_row * k, k, tile.num_rows};
  tensor_core::multiply(
      rows,
      operand_of_weight<tensor_core::Operand, kTransposed>(weight, tile.expert, k, n, first_column),
      k, bias != nullptr ? bias + tile.expert * n + first_column : nullptr,
      out + tile.first_row * n + first_column, n, shared_space);
}

// The block's part of the result of GroupedWeightGradient.
template <int kSize>
struct GradientTile {
  int64_t row_tiles, column_tiles;

  __device__ int64_t expert() const { return blockIdx.x / (row_tiles * column_tiles); }
  __device__ int64_t first_row() const { return blockIdx.x / column_tiles % row_tiles * kSize; }
  __device__ int64_t first_column() const { return blockIdx.x % column_tiles * kSize; }
};

template <typename scalar_t>
__global__ void __launch_bounds__(simt::kBlockThreads)
    rows_times_rows_kernel(const scalar_t* __restrict__ a, const scalar_t* __restrict__ b,
                           RowGroups experts, int64_t m, int64_t n,
                           GradientTile<simt::kBlockTile> tile, scalar_t* __restrict__ out) {
  using acc_t = acc_type<scalar_t>;
  const int64_t expert = tile.expert(), begin = experts.bounds[expert];
  const int64_t first_row = tile.first_row(), first_column = tile.first_column();
  const simt::Operand<scalar_t, false> left{a + begin * m + first_row, m, m - first_row};
  const simt::Operand<scalar_t, false> right{b + begin * n + first_column, n, n - first_column};
  simt::Accumulators<acc_t> accumulators;
  accumulators.mainloop(left, right, experts.bounds[expert + 1] - begin);
  accumulators.epilogue([&](int row, int column, acc_t value) {
    if (first_row + row >= m || first_column + column >= n) return;
    out[(expert * m + first_row + row) * n + first_column + column] = static_cast<scalar_t>(value);
  });
}

template <typename scalar_t>
__global__ void __launch_bounds__(tensor_core::kBlockThreads)
    rows_times_rows_tensor_core_kernel(const scalar_t* __restrict__ a,
                                       const scalar_t* __restrict__ b, RowGroups experts, int64_t m,
                                       int64_t n, GradientTile<tensor_core::kBlockTile> tile,
                                       scalar_t* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared_space[];
  const int64_t expert = tile.expert(), begin = experts.bounds[expert];
  const int64_t first_row = tile.first_row(), first_column = tile.first_column();
  const tensor_core::Operand<scalar_t, false> left{a + begin * m + first_row, m, m - first_row};
  const tensor_core::Operand<scalar_t, false> right{b + begin * n + first_column, n,
                                                    n - first_column};
  tensor_core::multiply(left, right, experts.bounds[expert + 1] - begin,
                        static_cast<const scalar_t*>(nullptr),
                        out + (expert * m + first_row) * n + first_column, n, shared_space);
}

// Writes zeros to out [E, size_of_expert] for the experts without rows. Each expert has several
// blocks.
template <typename Vec>
__global__ void zero_unused_kernel(RowGroups experts, int64_t size_of_expert,
                                   int64_t blocks_of_expert, Vec* __restrict__ out) {
  const int64_t expert = blockIdx.x / blocks_of_expert;
  if (experts.bounds[expert] != experts.bounds[expert + 1]) return;  // uniform over the block
  for (int64_t i = blockIdx.x % blocks_of_expert * blockDim.x + threadIdx.x; i < size_of_expert;
       i += blocks_of_expert * blockDim.x) {
    out[expert * size_of_expert + i] = Vec{};
  }
}

// Returns whether the lines of operands are aligned to 16 bytes; lengths are those of the lines.
bool fits_tensor_cores(std::initializer_list<const void*> operands,
                       std::initializer_list<int64_t> lengths) {
  return std::all_of(
             operands.begin(), operands.end(),
             [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }) &&
         std::all_of(lengths.begin(), lengths.end(),
                     [](int64_t length) { return length % tensor_core::kAccess == 0; });
}

}  // namespace
}  // namespace cuda
using namespace cuda;

template <typename scalar_t>
void GroupedGemm<scalar_t>::on_cuda(const CudaStream& stream) const {
  const auto start = [&](auto kernel, int64_t row_tiles, int size, int threads,
                         int64_t shared_bytes) {
    const int64_t column_tiles = ceil_div(n, size);
    launch(stream, kernel, grid(row_tiles * column_tiles), threads, shared_bytes, a, weight.data,
           bias, experts, k, n, column_tiles, out);
  };
  if constexpr (sizeof(scalar_t) == 2) {
    if (fits_tensor_cores({a, weight.data}, {k, n})) {
      const auto row_tiles = RowTile<tensor_core::kBlockTile>::count(experts);
      const auto start_on_tensor_cores = [&](auto kernel, int64_t shared_bytes) {
        start(kernel, row_tiles, tensor_core::kBlockTile, tensor_core::kBlockThreads, shared_bytes);
      };
      return weight.transposed
                 ? start_on_tensor_cores(rows_times_weights_tensor_core_kernel<true, scalar_t>,
                                         tensor_core::kSharedBytes<true, true>)
                 : start_on_tensor_cores(rows_times_weights_tensor_core_kernel<false, scalar_t>,
                                         tensor_core::kSharedBytes<true, false>);
    }
  }
  start(weight.transposed ? rows_times_weights_kernel<true, scalar_t>
                          : rows_times_weights_kernel<false, scalar_t>,
        RowTile<simt::kBlockTile>::count(experts), simt::kBlockTile, simt::kBlockThreads, 0);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(GroupedGemm)

template <typename scalar_t>
void GroupedWeightGradient<scalar_t>::on_cuda(const CudaStream& stream) const {
  const auto start = [&]<int kSize>(
                         void (*kernel)(const scalar_t*, const scalar_t*, RowGroups, int64_t,
                                        int64_t, GradientTile<kSize>, scalar_t*),
                         int threads, int64_t shared_bytes) {
    const GradientTile<kSize> tile{.row_tiles = ceil_div(m, kSize),
                                   .column_tiles = ceil_div(n, kSize)};
    launch(stream, kernel, grid(experts.num_groups * tile.row_tiles * tile.column_tiles), threads,
           shared_bytes, a, b, experts, m, n, tile, out);
  };
  if constexpr (sizeof(scalar_t) == 2) {
    if (fits_tensor_cores({a, b}, {m, n})) {
      return start(rows_times_rows_tensor_core_kernel<scalar_t>, tensor_core::kBlockThreads,
                   tensor_core::kSharedBytes<false, false>);
    }
  }
  start(rows_times_rows_kernel<scalar_t>, simt::kBlockThreads, 0);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(GroupedWeightGradient)

void ZerosOfUnusedExperts::on_cuda(const CudaStream& stream) const {
  using Vec = Vector<uint32_t, 4>;
  // The matrix of a single expert can occupy the whole device.
  constexpr int64_t kMostBlocks = 64, kVectors = 4;  // per expert; per thread
  const int64_t size = num_bytes / static_cast<int64_t>(sizeof(Vec));
  const int64_t blocks_of_expert = std::min(kMostBlocks, ceil_div(size, kVectors * kThreads));
  launch(stream, zero_unused_kernel<Vec>, grid(experts.num_groups * blocks_of_expert), kThreads, 0,
         experts, size, blocks_of_expert, static_cast<Vec*>(out));
}
MOE_EXT_DEFINE_ON_CUDA(ZerosOfUnusedExperts)

}  // namespace moe_ext
