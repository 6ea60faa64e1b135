// The step of factored Adam and Adagrad (App. D) on the CPU.
//
// The gradient of each matrix is read twice: for the moments, and from the cache for the update.
// The remaining memory traffic is one read of the gradients, and one read and one write of the
// weights.
#include "../kernels/factored.h"

#include <algorithm>
#include <vector>

#include "../math/factored.h"
#include "parallel.h"
#include "vectorize.h"

namespace moe_ext {
namespace cpu {
namespace {

// Rows are summed in blocks of this size; a block with a zero gradient is skipped. The sum of a
// column then has at most kBlockRows + R / kBlockRows roundings.
constexpr int64_t kBlockRows = 64;

template <typename acc_t>
struct Rule {
  acc_t lr, correction, decay, gain, eps;
  bool mean_of_roots;
};

// Returns whether any element is nonzero; stops at the first chunk that has one.
struct AnyNonzero {
  template <typename scalar_t>
  MOE_EXT_KERNEL void run(const scalar_t* values, int64_t size, char* found) {
    constexpr int64_t kChunk = 1024;
    *found = 0;
    for (int64_t begin = 0; begin < size && !*found; begin += kChunk) {
      const int64_t end = std::min(size, begin + kChunk);
      int32_t any = 0;
      for (int64_t i = begin; i < end; ++i) any |= values[i] != scalar_t(0);
      *found = any != 0;
    }
  }
};

// Computes the sums of g^2 over the rows and over the columns of a block.
struct SumSquares {
  template <typename scalar_t, typename acc_t>
  MOE_EXT_KERNEL void run(const scalar_t* grad, int64_t num_rows, int64_t num_columns,
                          math::Range<acc_t> range, acc_t* __restrict row_sum,
                          acc_t* __restrict column_sum) {
    for (int64_t j = 0; j < num_columns; ++j) column_sum[j] = 0;
    for (int64_t i = 0; i < num_rows; ++i) {
      const scalar_t* g = grad + i * num_columns;
      row_sum[i] = sum_of_terms<acc_t>(
          num_columns, [&](int64_t j, acc_t partial) __attribute__((always_inline)) {
            const acc_t x = range.usable(static_cast<acc_t>(g[j]));
            const acc_t square = x * x;
            column_sum[j] += square;
            return partial + square;
          });
    }
  }
};

struct StepRow {
  template <typename scalar_t, typename acc_t>
  MOE_EXT_KERNEL void run(scalar_t* __restrict param, const scalar_t* __restrict grad, acc_t lr,
                          acc_t row_factor, const acc_t* __restrict column_factor, acc_t eps,
                          math::Range<acc_t> range, int64_t num_columns) {
    for (int64_t j = 0; j < num_columns; ++j) {
      param[j] = static_cast<scalar_t>(math::stepped(static_cast<acc_t>(param[j]),
                                                     range.usable(static_cast<acc_t>(grad[j])), lr,
                                                     row_factor * column_factor[j] + eps));
    }
  }
};

// One matrix and its second moments, all contiguous.
template <typename scalar_t, typename acc_t>
struct Matrix {
  scalar_t* param;
  const scalar_t* grad;
  acc_t* row;
  acc_t* column;
};

// Updates one matrix. for_range(size, work_per_item, body) calls body(begin, end) on ranges that
// cover [0, size). It may do so in any order or in parallel: no sum depends on it.
template <typename scalar_t, typename acc_t, typename ForRange>
void step_matrix(const Matrix<scalar_t, acc_t>& matrix, int64_t num_rows, int64_t num_columns,
                 const Rule<acc_t>& rule, std::vector<acc_t>& scratch, const ForRange& for_range) {
  const int64_t num_blocks = (num_rows + kBlockRows - 1) / kBlockRows;
  scratch.resize(num_blocks * num_columns + num_columns + num_rows);
  acc_t* const block_sums = scratch.data();
  acc_t* const column_factor = block_sums + num_blocks * num_columns;
  acc_t* const row_factor = column_factor + num_columns;
  std::vector<char> nonzero(num_blocks);
  const math::Range<acc_t> range(num_rows, num_columns, rule.correction);
  const auto rows_of = [&](int64_t block) {
    return std::min(kBlockRows, num_rows - block * kBlockRows);
  };

  for_range(num_blocks, kBlockRows * num_columns, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlockRows;
      const auto* grad = matrix.grad + first * num_columns;
      acc_t* row_sum = row_factor + first;
      vectorized<AnyNonzero>(grad, rows_of(block) * num_columns, &nonzero[block]);
      if (nonzero[block]) {
        vectorized<SumSquares>(grad, rows_of(block), num_columns, range, row_sum,
                               block_sums + block * num_columns);
      } else {
        std::fill_n(row_sum, rows_of(block), acc_t(0));
      }
      for (int64_t i = first; i < first + rows_of(block); ++i) {
        matrix.row[i] = math::second_moment(matrix.row[i], row_factor[i] / num_columns, rule.decay,
                                            rule.gain, range.moment);
      }
    }
  });
  for_range(num_columns, num_blocks + 1, [&](int64_t begin, int64_t end) {
    std::fill(column_factor + begin, column_factor + end, acc_t(0));
    for (int64_t block = 0; block < num_blocks; ++block) {
      if (!nonzero[block]) continue;
      const acc_t* column_sum = block_sums + block * num_columns;
      for (int64_t j = begin; j < end; ++j) column_factor[j] += column_sum[j];
    }
    for (int64_t j = begin; j < end; ++j) {
      matrix.column[j] = math::second_moment(matrix.column[j], column_factor[j] / num_rows,
                                             rule.decay, rule.gain, range.moment);
    }
  });
  if (std::find(nonzero.begin(), nonzero.end(), 1) == nonzero.end()) return;

  acc_t eps = rule.eps;
  if (rule.mean_of_roots) {
    for (int64_t j = 0; j < num_columns; ++j) {
      column_factor[j] = math::root_with_eps(matrix.column[j], rule.correction, rule.eps);
    }
    const acc_t mean = sum(column_factor, num_columns) / num_columns;
    for (int64_t i = 0; i < num_rows; ++i) {
      row_factor[i] = math::root_with_eps(matrix.row[i], rule.correction, rule.eps) / mean;
    }
    eps = 0;
  } else {
    const acc_t mean = sum(matrix.row, num_rows) / num_rows;
    for (int64_t j = 0; j < num_columns; ++j) {
      column_factor[j] = math::column_root(matrix.column[j]);
    }
    for (int64_t i = 0; i < num_rows; ++i) {
      row_factor[i] = math::row_root(matrix.row[i], mean, rule.correction);
    }
  }
  // Runs backwards: the blocks that were read last are still in the cache.
  for_range(num_blocks, kBlockRows * num_columns, [&](int64_t begin, int64_t end) {
    for (int64_t block = end - 1; block >= begin; --block) {
      if (!nonzero[block]) continue;
      const int64_t first = block * kBlockRows;
      for (int64_t i = first; i < first + rows_of(block); ++i) {
        vectorized<StepRow>(matrix.param + i * num_columns, matrix.grad + i * num_columns, rule.lr,
                            row_factor[i], static_cast<const acc_t*>(column_factor), eps, range,
                            num_columns);
      }
    }
  });
}

}  // namespace
}  // namespace cpu
using namespace cpu;

template <typename scalar_t>
void FactoredStep<scalar_t>::on_cpu() const {
  const int64_t size = num_rows * num_columns;
  const Rule<acc_t> rule{.lr = static_cast<acc_t>(lr.on_host),
                         .correction = static_cast<acc_t>(correction.on_host),
                         .decay = static_cast<acc_t>(decay),
                         .gain = static_cast<acc_t>(gain),
                         .eps = static_cast<acc_t>(eps),
                         .mean_of_roots = mean_of_roots};
  const auto step = [&](int64_t m, std::vector<acc_t>& scratch, const auto& for_range) {
    step_matrix(Matrix<scalar_t, acc_t>{.param = param + m * size,
                                        .grad = grad + m * size,
                                        .row = row + m * num_rows,
                                        .column = column + m * num_columns},
                num_rows, num_columns, rule, scratch, for_range);
  };
  if (num_matrices >= 4 * num_threads()) {
    parallel_for(num_matrices, size, [&](int64_t begin, int64_t end) {
      std::vector<acc_t> scratch;
      for (int64_t m = begin; m < end; ++m) {
        step(m, scratch, [](int64_t count, int64_t, const auto& body) { body(0, count); });
      }
    });
  } else {
    std::vector<acc_t> scratch;
    for (int64_t m = 0; m < num_matrices; ++m) {
      step(m, scratch, [](int64_t count, int64_t work_per_item, const auto& body) {
        parallel_for(count, work_per_item, body);
      });
    }
  }
}
MOE_EXT_DEFINE_RUN_ON_CPU(FactoredStep)

}  // namespace moe_ext
