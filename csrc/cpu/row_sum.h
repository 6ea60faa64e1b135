// Sums of rows, as combine and the backward of dispatch need them.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "../checks.h"
#include "empty_rows.h"
#include "parallel.h"
#include "vectorize.h"

namespace moe_ext::cpu {

// A row that is summed in acc_t and stored in scalar_t: in place when the two are the same.
template <typename scalar_t, typename acc_t>
class RowSum {
 public:
  explicit RowSum(int64_t width) : width_(width), wide_(kInPlace ? 0 : width) {}

  // Starts a sum at zero; returns where to add.
  acc_t* start(scalar_t* row) {
    row_ = row;
    if constexpr (kInPlace) {
      std::fill_n(row, width_, acc_t(0));
      return row;
    } else {
      std::fill_n(wide_.data(), width_, acc_t(0));
      return wide_.data();
    }
  }

  void finish() {
    if constexpr (!kInPlace) {
      for (int64_t d = 0; d < width_; ++d) row_[d] = static_cast<scalar_t>(wide_[d]);
    }
  }

 private:
  static constexpr bool kInPlace = std::is_same_v<scalar_t, acc_t>;
  int64_t width_;
  std::vector<acc_t> wide_;
  scalar_t* row_ = nullptr;
};

struct AddScaledRow {
  template <typename scalar_t, typename acc_t>
  MOE_EXT_KERNEL void run(acc_t scale, const scalar_t* row, int64_t size, acc_t* sum) {
    for (int64_t d = 0; d < size; ++d) {
      sum[d] = std::fma(scale, static_cast<acc_t>(row[d]), sum[d]);
    }
  }
};

// out[t] = sum_j weights[t, j] * rows[row_of[t, j]], in the order of the choices. All are
// contiguous, weights in the accumulation type of rows; undefined weights are all 1, exactly.
inline Tensor sum_of_rows(const Tensor& rows, const Tensor& row_of, const Tensor& weights) {
  const int64_t num_tokens = row_of.size(0);
  const int64_t k = row_of.size(1);
  const int64_t width = rows.size(1);
  Tensor out = empty_rows({num_tokens, width}, rows.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.scalar_type(), "sum_of_rows", [&] {
    using acc_t = at::opmath_type<scalar_t>;
    const auto* rows_data = rows.const_data_ptr<scalar_t>();
    const auto* row_data = row_of.const_data_ptr<int64_t>();
    const auto* weights_data = weights.defined() ? weights.const_data_ptr<acc_t>() : nullptr;
    auto* out_data = out.mutable_data_ptr<scalar_t>();
    parallel_for(num_tokens, k * width, [&](int64_t begin, int64_t end) {
      RowSum<scalar_t, acc_t> sum(width);
      for (int64_t t = begin; t < end; ++t) {
        acc_t* total = sum.start(out_data + t * width);
        for (int64_t slot = t * k; slot < (t + 1) * k; ++slot) {
          const acc_t weight = weights_data != nullptr ? weights_data[slot] : acc_t(1);
          vectorized<AddScaledRow>(weight, rows_data + row_data[slot] * width, width, total);
        }
        sum.finish();
      }
    });
  });
  return out;
}

}  // namespace moe_ext::cpu
