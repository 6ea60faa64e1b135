// A sum of rows, as dispatch and combine need it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

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

}  // namespace moe_ext::cpu
