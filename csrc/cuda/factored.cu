// The step of factored Adam and Adagrad (App. D) on CUDA.
//
// The matrices are divided into blocks of kBlockRows x kBlockColumns. The first kernel sums g^2
// over each block's rows and columns. The next two add these sums in block order and update the
// second moments. The last one updates the weights and skips blocks with a zero gradient. The
// gradients are read twice; the weights are read and written once.

#include <algorithm>

#include "../kernels/factored.h"
#include "../math/factored.h"
#include "vectors.cuh"

namespace moe_ext {
namespace cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;
constexpr int kRowsOfWarp = 8;
constexpr int kBlockRows = kWarps * kRowsOfWarp;
constexpr int kBlockColumns = 1024;

// A scalar that is read on the host before the launch, or on the device by the kernel.
template <typename acc_t>
struct Scalar {
  const double* on_device;
  acc_t on_host;

  __device__ acc_t value() const {
    return on_device != nullptr ? static_cast<acc_t>(*on_device) : on_host;
  }
};

template <typename acc_t>
Scalar<acc_t> scalar_of(const FactoredScalar& scalar) {
  return {.on_device = scalar.on_device, .on_host = static_cast<acc_t>(scalar.on_host)};
}

// The matrices [E, R, C] and their E x row_blocks x column_blocks blocks.
struct Shape {
  int64_t num_matrices, num_rows, num_columns, row_blocks, column_blocks;

  // The indices of this thread block.
  __device__ int64_t matrix() const { return blockIdx.x / (row_blocks * column_blocks); }
  __device__ int64_t row_block() const { return blockIdx.x / column_blocks % row_blocks; }
  __device__ int64_t column_block() const { return blockIdx.x % column_blocks; }
  // The first row of this warp, and the first and end column of this block.
  __device__ int64_t first_row() const {
    return row_block() * kBlockRows + threadIdx.x / kWarp * kRowsOfWarp;
  }
  __device__ int64_t first_column() const { return column_block() * kBlockColumns; }
  __device__ int64_t end_column() const {
    return std::min(num_columns, first_column() + kBlockColumns);
  }
};

template <typename acc_t>
struct Rule {
  Scalar<acc_t> lr, correction;
  acc_t decay, gain, eps;
  bool mean_of_roots;

  __device__ math::Range<acc_t> range(const Shape& shape) const {
    return {shape.num_rows, shape.num_columns, correction.value()};
  }
};

// Computes row_sums [E, column_blocks, R] and column_sums [E, row_blocks, C] of g^2 for each block,
// and whether the block has a nonzero gradient. A warp has kRowsOfWarp rows, a lane kSize columns
// at a time.
template <int kSize, typename scalar_t, typename acc_t>
__global__ void block_sums_kernel(const scalar_t* __restrict__ all_grad, Shape shape,
                                  Rule<acc_t> rule, acc_t* __restrict__ row_sums,
                                  acc_t* __restrict__ column_sums, int* __restrict__ nonzero) {
  using Vec = Vector<scalar_t, kSize>;
  constexpr int kTileColumns = kWarp * kSize;
  __shared__ acc_t sums_of_warps[kWarps][kTileColumns];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t matrix = shape.matrix();
  const int64_t first_row = shape.first_row();
  const int64_t end_column = shape.end_column();
  const scalar_t* grad = all_grad + matrix * shape.num_rows * shape.num_columns;
  acc_t* column_sum =
      column_sums + (matrix * shape.row_blocks + shape.row_block()) * shape.num_columns;

  const math::Range<acc_t> range = rule.range(shape);
  acc_t row_sum[kRowsOfWarp] = {};
  bool any = false;
  for (int64_t first = shape.first_column(); first < end_column; first += kTileColumns) {
    const int64_t column = first + lane * kSize;
    acc_t sum[kSize] = {};
    if (column < end_column) {
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) {
        const int64_t row = first_row + r;
        if (row >= shape.num_rows) break;
        const Vec g = *reinterpret_cast<const Vec*>(grad + row * shape.num_columns + column);
#pragma unroll
        for (int c = 0; c < kSize; ++c) {
          const acc_t x = range.usable(static_cast<acc_t>(g.values[c]));
          const acc_t square = x * x;
          any |= x != acc_t(0);
          sum[c] += square;
          row_sum[r] += square;
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kSize; ++c) sums_of_warps[warp][lane * kSize + c] = sum[c];
    __syncthreads();
    for (int c = threadIdx.x; c < kTileColumns && first + c < end_column; c += kThreads) {
      acc_t total = 0;
      for (int w = 0; w < kWarps; ++w) total += sums_of_warps[w][c];
      column_sum[first + c] = total;
    }
    __syncthreads();  // the next tile reuses sums_of_warps
  }
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    const acc_t total = warp_sum(row_sum[r]);
    if (lane == 0 && first_row + r < shape.num_rows) {
      row_sums[(matrix * shape.column_blocks + shape.column_block()) * shape.num_rows + first_row +
               r] = total;
    }
  }
  const int found = __syncthreads_or(any);
  if (threadIdx.x == 0) nonzero[blockIdx.x] = found;
}

// Updates the second moments of the columns; a block has kWarp columns.
template <typename acc_t>
__global__ void column_averages_kernel(const acc_t* __restrict__ column_sums, Shape shape,
                                       Rule<acc_t> rule, acc_t* __restrict__ column_averages) {
  __shared__ acc_t sums_of_warps[kWarps][kWarp];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t tiles = ceil_div(shape.num_columns, kWarp);
  const int64_t matrix = blockIdx.x / tiles;
  const int64_t column = blockIdx.x % tiles * kWarp + lane;
  acc_t sum = 0;
  if (column < shape.num_columns) {
    for (int64_t block = warp; block < shape.row_blocks; block += kWarps) {
      sum += column_sums[(matrix * shape.row_blocks + block) * shape.num_columns + column];
    }
  }
  sums_of_warps[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && column < shape.num_columns) {
    for (int w = 1; w < kWarps; ++w) sum += sums_of_warps[w][lane];
    acc_t* average = column_averages + matrix * shape.num_columns + column;
    *average = math::second_moment(*average, sum / shape.num_rows, rule.decay, rule.gain,
                                   rule.range(shape).moment);
  }
}

// Updates the second moments of a matrix's rows. Computes the mean that divides the matrix's
// factors: the mean of the row moments or of the column roots. One block per matrix.
template <typename acc_t>
__global__ void row_averages_kernel(const acc_t* __restrict__ row_sums,
                                    const acc_t* __restrict__ column_averages, Shape shape,
                                    Rule<acc_t> rule, acc_t* __restrict__ row_averages,
                                    acc_t* __restrict__ means) {
  __shared__ acc_t space[kWarps];
  const int64_t matrix = blockIdx.x;
  acc_t* average = row_averages + matrix * shape.num_rows;
  const acc_t* column_average = column_averages + matrix * shape.num_columns;
  const acc_t most = rule.range(shape).moment;
  acc_t sum_of_averages = 0;
  for (int64_t row = threadIdx.x; row < shape.num_rows; row += kThreads) {
    acc_t sum = 0;
    for (int64_t block = 0; block < shape.column_blocks; ++block) {
      sum += row_sums[(matrix * shape.column_blocks + block) * shape.num_rows + row];
    }
    average[row] =
        math::second_moment(average[row], sum / shape.num_columns, rule.decay, rule.gain, most);
    sum_of_averages += average[row];
  }
  acc_t mean;
  if (rule.mean_of_roots) {
    const acc_t correction = rule.correction.value();
    acc_t sum_of_roots = 0;
    for (int64_t column = threadIdx.x; column < shape.num_columns; column += kThreads) {
      sum_of_roots += math::root_with_eps(column_average[column], correction, rule.eps);
    }
    mean = block_sum(sum_of_roots, space) / shape.num_columns;
  } else {
    mean = block_sum(sum_of_averages, space) / shape.num_rows;
  }
  if (threadIdx.x == 0) means[matrix] = mean;
}

template <int kSize, typename scalar_t, typename acc_t>
__global__ void update_kernel(scalar_t* __restrict__ all_param,
                              const scalar_t* __restrict__ all_grad,
                              const acc_t* __restrict__ row_averages,
                              const acc_t* __restrict__ column_averages,
                              const acc_t* __restrict__ means, const int* __restrict__ nonzero,
                              Shape shape, Rule<acc_t> rule) {
  using Vec = Vector<scalar_t, kSize>;
  if (!nonzero[blockIdx.x]) return;
  const int lane = threadIdx.x % kWarp;
  const int64_t matrix = shape.matrix();
  const int64_t first_row = shape.first_row();
  const int64_t end_column = shape.end_column();
  const acc_t* row_average = row_averages + matrix * shape.num_rows;
  const acc_t* column_average = column_averages + matrix * shape.num_columns;
  const acc_t lr = rule.lr.value();
  const acc_t correction = rule.correction.value();
  const acc_t mean = means[matrix];
  const acc_t eps = rule.mean_of_roots ? acc_t(0) : rule.eps;
  const math::Range<acc_t> range = rule.range(shape);

  acc_t row_factor[kRowsOfWarp] = {};
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    if (first_row + r >= shape.num_rows) break;
    const acc_t average = row_average[first_row + r];
    row_factor[r] = rule.mean_of_roots ? math::root_with_eps(average, correction, rule.eps) / mean
                                       : math::row_root(average, mean, correction);
  }
  for (int64_t column = shape.first_column() + lane * kSize; column < end_column;
       column += kWarp * kSize) {
    acc_t column_factor[kSize];
#pragma unroll
    for (int c = 0; c < kSize; ++c) {
      const acc_t average = column_average[column + c];
      column_factor[c] = rule.mean_of_roots ? math::root_with_eps(average, correction, rule.eps)
                                            : math::column_root(average);
    }
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) {
      if (first_row + r >= shape.num_rows) break;
      const int64_t at = (matrix * shape.num_rows + first_row + r) * shape.num_columns + column;
      const Vec grad = *reinterpret_cast<const Vec*>(all_grad + at);
      Vec* param = reinterpret_cast<Vec*>(all_param + at);
      Vec stepped = *param;
#pragma unroll
      for (int c = 0; c < kSize; ++c) {
        stepped.values[c] = static_cast<scalar_t>(math::stepped(
            static_cast<acc_t>(stepped.values[c]), range.usable(static_cast<acc_t>(grad.values[c])),
            lr, row_factor[r] * column_factor[c] + eps));
      }
      *param = stepped;
    }
  }
}

}  // namespace
}  // namespace cuda
using namespace cuda;

template <typename scalar_t>
void FactoredStep<scalar_t>::on_cuda(const CudaStream& stream) const {
  const Shape shape{.num_matrices = num_matrices,
                    .num_rows = num_rows,
                    .num_columns = num_columns,
                    .row_blocks = ceil_div(num_rows, kBlockRows),
                    .column_blocks = ceil_div(num_columns, kBlockColumns)};
  const int64_t num_blocks = num_matrices * shape.row_blocks * shape.column_blocks;
  auto* row_sums = stream.take<acc_t>(num_matrices * shape.column_blocks * num_rows);
  auto* column_sums = stream.take<acc_t>(num_matrices * shape.row_blocks * num_columns);
  auto* means = stream.take<acc_t>(num_matrices);
  auto* nonzero = stream.take<int>(num_blocks);
  const Rule<acc_t> rule{.lr = scalar_of<acc_t>(lr),
                         .correction = scalar_of<acc_t>(correction),
                         .decay = static_cast<acc_t>(decay),
                         .gain = static_cast<acc_t>(gain),
                         .eps = static_cast<acc_t>(eps),
                         .mean_of_roots = mean_of_roots};
  with_vector_size<scalar_t>(num_columns, {param, grad}, [&](auto size) {
    launch_blocks(stream, block_sums_kernel<size, scalar_t, acc_t>, num_blocks, grad, shape, rule,
                  row_sums, column_sums, nonzero);
    launch_blocks(stream, column_averages_kernel<acc_t>,
                  num_matrices * ceil_div(num_columns, kWarp), column_sums, shape, rule, column);
    launch_blocks(stream, row_averages_kernel<acc_t>, num_matrices, row_sums, column, shape, rule,
                  row, means);
    launch_blocks(stream, update_kernel<size, scalar_t, acc_t>, num_blocks, param, grad, row,
                  column, means, nonzero, shape, rule);
  });
}
MOE_EXT_DEFINE_RUN_ON_CUDA(FactoredStep)

}  // namespace moe_ext
