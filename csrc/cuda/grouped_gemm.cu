// The grouped GEMMs of the experts on CUDA.
//
// Half precision uses the tensor cores if the lines of both operands are aligned to 16 bytes. All
// other GEMMs accumulate as the CPU does. Float32 is never TF32, because the difference of a logit
// and its threshold cancels.
#include <algorithm>
#include <cub/block/block_scan.cuh>
#include <initializer_list>

#include "../kernels/grouped_gemm.h"
#include "simt.cuh"
#include "tensor_core.cuh"
#include "vectors.cuh"

namespace moe_ext {
namespace cuda {
namespace {

// A tile of the result [R, N] of GroupedGemm.
struct Tile {
  int64_t expert;
  int64_t first_row, first_column;
  int64_t num_rows;  // of the expert, from first_row on
};

// The tiles that have rows. No tile has rows of two experts. Tiles of the same rows follow each
// other.
struct TileList {
  RowGroups experts;
  int64_t rows, columns;  // of a tile
  int64_t column_tiles;   // of each row
  int64_t* first_tiles;   // [E + 1], the tiles of a column before each expert, and all of them

  // At most one tile of each expert is not full.
  int64_t most_tiles() const {
    return (experts.num_rows / rows + experts.num_groups) * column_tiles;
  }
  __device__ int64_t size() const { return first_tiles[experts.num_groups] * column_tiles; }
  __device__ Tile operator[](int64_t number) const {
    const int64_t row_tile = number / column_tiles;
    const RowGroups tiles{.bounds = first_tiles, .num_groups = experts.num_groups, .num_rows = 0};
    const int64_t expert = tiles.group_of(row_tile);
    const int64_t first_row = experts.bounds[expert] + (row_tile - first_tiles[expert]) * rows;
    return {.expert = expert,
            .first_row = first_row,
            .first_column = number % column_tiles * columns,
            .num_rows = experts.bounds[expert + 1] - first_row};
  }
};

// Writes tiles.first_tiles; one block.
__global__ void first_tiles_kernel(TileList tiles) {
  using Scan = cub::BlockScan<int64_t, kThreads>;
  __shared__ typename Scan::TempStorage space;
  const int64_t* bounds = tiles.experts.bounds;
  const int64_t num_experts = tiles.experts.num_groups;
  int64_t num_tiles = 0;
  for (int64_t first = 0; first < num_experts; first += kThreads) {
    const int64_t e = first + threadIdx.x;
    const int64_t own = e < num_experts ? ceil_div(bounds[e + 1] - bounds[e], tiles.rows) : 0;
    int64_t before = 0, all = 0;
    Scan(space).ExclusiveSum(own, before, all);
    if (e < num_experts) tiles.first_tiles[e] = num_tiles + before;
    num_tiles += all;
    __syncthreads();  // the next scan uses `space`
  }
  if (threadIdx.x == 0) tiles.first_tiles[num_experts] = num_tiles;
}

// The kernels of GroupedGemm have as many blocks as run at the same time. Each block computes every
// gridDim.x-th tile of the list.
template <bool kTransposed, typename scalar_t>
__global__ void __launch_bounds__(simt::kBlockThreads)
    rows_times_weights_kernel(const scalar_t* __restrict__ a, const scalar_t* __restrict__ weight,
                              TileList tiles, int64_t k, int64_t n, scalar_t* __restrict__ out) {
  using acc_t = acc_type<scalar_t>;
  const int64_t num_tiles = tiles.size();
  for (int64_t number = blockIdx.x; number < num_tiles; number += gridDim.x) {
    const Tile tile = tiles[number];
    const simt::Operand<scalar_t, true> rows{a + tile.first_row * k, k, tile.num_rows};
    const simt::Operand<scalar_t, kTransposed> columns{
        weight + tile.expert * k * n + tile.first_column * (kTransposed ? k : 1),
        kTransposed ? k : n, n - tile.first_column};
    simt::Accumulators<acc_t> accumulators;
    accumulators.mainloop(rows, columns, k);
    accumulators.epilogue([&](int row, int column_of_tile, acc_t value) {
      const int64_t column = tile.first_column + column_of_tile;
      if (row >= tile.num_rows || column >= n) return;
      out[(tile.first_row + row) * n + column] = static_cast<scalar_t>(value);
    });
  }
}

template <bool kTransposed, int kRows, typename scalar_t>
__global__ void __launch_bounds__(tensor_core::kBlockThreads)
    rows_times_weights_tensor_core_kernel(const scalar_t* __restrict__ a,
                                          const scalar_t* __restrict__ weight, TileList tiles,
                                          int64_t k, int64_t n, scalar_t* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared_space[];
  using Rows = tensor_core::Operand<scalar_t, true, kRows>;
  using Columns = tensor_core::Operand<scalar_t, kTransposed, tensor_core::kColumns>;
  const int64_t num_tiles = tiles.size();
  for (int64_t number = blockIdx.x; number < num_tiles; number += gridDim.x) {
    const Tile tile = tiles[number];
    const Rows rows(a + tile.first_row * k, k, tile.num_rows, k);
    const Columns columns(weight + tile.expert * k * n + tile.first_column * (kTransposed ? k : 1),
                          kTransposed ? k : n, n - tile.first_column, k);
    tensor_core::multiply(rows, columns, k, out + tile.first_row * n + tile.first_column, n,
                          shared_space);
    __syncthreads();  // the next tile uses the shared memory
  }
}

// The tile of a block of GroupedWeightGradient. Each expert has the same tiles, also without rows,
// but not the same time for one: the device gives the next tile to the block that is ready first.
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
                                       int64_t n, GradientTile<tensor_core::kColumns> tile,
                                       scalar_t* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared_space[];
  const int64_t expert = tile.expert(), begin = experts.bounds[expert];
  const int64_t first_row = tile.first_row(), first_column = tile.first_column();
  const int64_t num_rows = experts.bounds[expert + 1] - begin;
  using Columns = tensor_core::Operand<scalar_t, false, tensor_core::kColumns>;
  const Columns left(a + begin * m + first_row, m, m - first_row, num_rows);
  const Columns right(b + begin * n + first_column, n, n - first_column, num_rows);
  tensor_core::multiply(left, right, num_rows, out + (expert * m + first_row) * n + first_column, n,
                        shared_space);
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

// Calls body(std::integral_constant<int, rows>()) with the rows of a tile: enough for the mean rows
// of an expert, which the host knows without waiting for the device.
template <typename Body>
void with_rows_of_tile(const RowGroups& experts, const Body& body) {
  const auto has_mean = [&](int64_t rows) { return experts.num_rows <= rows * experts.num_groups; };
  if (has_mean(16)) return body(std::integral_constant<int, 16>());
  if (has_mean(32)) return body(std::integral_constant<int, 32>());
  if (has_mean(64)) return body(std::integral_constant<int, 64>());
  body(std::integral_constant<int, tensor_core::kMostRows>());
}

}  // namespace
}  // namespace cuda
using namespace cuda;

template <typename scalar_t>
void GroupedGemm<scalar_t>::on_cuda(const CudaStream& stream) const {
  const auto start = [&](auto kernel, int64_t rows, int64_t columns, int threads,
                         int64_t shared_bytes) {
    const TileList tiles{.experts = experts,
                         .rows = rows,
                         .columns = columns,
                         .column_tiles = ceil_div(n, columns),
                         .first_tiles = stream.take<int64_t>(experts.num_groups + 1)};
    launch_blocks(stream, first_tiles_kernel, 1, tiles);
    const int64_t most_blocks = resident_blocks(kernel, threads, shared_bytes);
    launch(stream, kernel, std::min(tiles.most_tiles(), most_blocks), threads, shared_bytes, a,
           weight.data, tiles, k, n, out);
  };
  if constexpr (sizeof(scalar_t) == 2) {
    if (fits_tensor_cores({a, weight.data}, {k, n})) {
      using namespace tensor_core;
      return with_rows_of_tile(experts, [&](auto rows) {
        if (weight.transposed) {
          start(rows_times_weights_tensor_core_kernel<true, rows, scalar_t>, rows, kColumns,
                kBlockThreads, kSharedBytes<rows, true, true>);
        } else {
          start(rows_times_weights_tensor_core_kernel<false, rows, scalar_t>, rows, kColumns,
                kBlockThreads, kSharedBytes<rows, true, false>);
        }
      });
    }
  }
  start(weight.transposed ? rows_times_weights_kernel<true, scalar_t>
                          : rows_times_weights_kernel<false, scalar_t>,
        simt::kBlockTile, simt::kBlockTile, simt::kBlockThreads, 0);
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
    launch(stream, kernel, experts.num_groups * tile.row_tiles * tile.column_tiles, threads,
           shared_bytes, a, b, experts, m, n, tile, out);
  };
  if constexpr (sizeof(scalar_t) == 2) {
    if (fits_tensor_cores({a, b}, {m, n})) {
      return start(rows_times_rows_tensor_core_kernel<scalar_t>, tensor_core::kBlockThreads,
                   tensor_core::kSharedBytes<tensor_core::kMostRows, false, false>);
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
  launch_blocks(stream, zero_unused_kernel<Vec>, experts.num_groups * blocks_of_expert, experts,
                size, blocks_of_expert, static_cast<Vec*>(out));
}
MOE_EXT_DEFINE_ON_CUDA(ZerosOfUnusedExperts)

}  // namespace moe_ext
