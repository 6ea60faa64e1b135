// The slots of a token, and the sum of their rows: what dispatch, combine and experts share.
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

// Which slots each token has: K, or those between two offsets; and the row of each slot.
class Slots {
 public:
  // Checks that every row belongs to one slot.
  Slots(const char* op, const Tensor& inverse, const OptionalTensor& token_offsets)
      : row_of_(inverse.contiguous()),
        offsets_(token_offsets ? token_offsets->contiguous() : Tensor()),
        k_(token_offsets ? 0 : inverse.size(1)),
        num_tokens_(token_offsets ? token_offsets->numel() - 1 : inverse.size(0)) {
    check_permutation(op, "inverse", row_of_);
    if (token_offsets) {
      check_offsets(op, "token_offsets", offsets_, num_slots());
      bounds_ = offsets_.const_data_ptr<int64_t>();
    }
    rows_ = row_of_.const_data_ptr<int64_t>();
  }

  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_slots() const { return row_of_.numel(); }
  int64_t begin(int64_t token) const { return bounds_ ? bounds_[token] : token * k_; }
  int64_t end(int64_t token) const { return begin(token + 1); }
  int64_t row(int64_t slot) const { return rows_[slot]; }

  // Calls body(first_token, last_token) in parallel when a slot costs `work_per_slot`.
  template <typename Body>
  void for_tokens(int64_t work_per_slot, const Body& body) const {
    const int64_t slots_per_token = num_slots() / std::max<int64_t>(1, num_tokens_) + 1;
    parallel_for(num_tokens_, slots_per_token * work_per_slot, body);
  }

 private:
  Tensor row_of_;
  Tensor offsets_;
  int64_t k_;
  int64_t num_tokens_;
  const int64_t* bounds_ = nullptr;
  const int64_t* rows_ = nullptr;
};

// out[t] = the sum of weights[s] * rows[row of s] over the slots s of token t, in their order. All
// are contiguous, weights in the accumulation type of rows; undefined weights are all 1, exactly.
inline Tensor sum_of_rows(const Tensor& rows, const Slots& slots, const Tensor& weights) {
  const int64_t width = rows.size(1);
  Tensor out = empty_rows({slots.num_tokens(), width}, rows.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.scalar_type(), "sum_of_rows", [&] {
    using acc_t = at::opmath_type<scalar_t>;
    const auto* rows_data = rows.const_data_ptr<scalar_t>();
    const auto* weights_data = weights.defined() ? weights.const_data_ptr<acc_t>() : nullptr;
    auto* out_data = out.mutable_data_ptr<scalar_t>();
    slots.for_tokens(width, [&](int64_t begin, int64_t end) {
      RowSum<scalar_t, acc_t> sum(width);
      for (int64_t t = begin; t < end; ++t) {
        acc_t* total = sum.start(out_data + t * width);
        for (int64_t slot = slots.begin(t); slot < slots.end(t); ++slot) {
          const acc_t weight = weights_data != nullptr ? weights_data[slot] : acc_t(1);
          vectorized<AddScaledRow>(weight, rows_data + slots.row(slot) * width, width, total);
        }
        sum.finish();
      }
    });
  });
  return out;
}

}  // namespace moe_ext::cpu
