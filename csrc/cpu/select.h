// Selects the top k of a row of logits or scores.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "../math/order.h"
#include "vectorize.h"

namespace moe_ext::cpu {

// The total order of the top k: larger values first, NaN last, ties by the lower index.
template <typename acc_t>
struct Ranked {
  acc_t value;
  int64_t index;
};

template <typename acc_t>
bool ranks_before(const Ranked<acc_t>& a, const Ranked<acc_t>& b) {
  const auto a_key = math::order_key(a.value);
  const auto b_key = math::order_key(b.value);
  return a_key == b_key ? a.index < b.index : a_key > b_key;
}

// Returns a bound that at least `num_kept` <= kLanes values of the row reach, and few others. It is
// the num_kept-th largest of the maxima of kLanes interleaved parts of the row. If too many values
// are NaN, it is -infinity.
template <typename acc_t>
MOE_EXT_KERNEL acc_t reached_by(const acc_t* row, int64_t size, int64_t num_kept) {
  acc_t maximum[kLanes];
  int above[kLanes] = {};  // the number of larger maxima
  for (int64_t l = 0; l < kLanes; ++l) maximum[l] = -std::numeric_limits<acc_t>::infinity();
  for (int64_t i = 0; i + kLanes <= size; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) {
      maximum[l] = row[i + l] > maximum[l] ? row[i + l] : maximum[l];
    }
  }
  for (int64_t m = 0; m < kLanes; ++m) {
    for (int64_t l = 0; l < kLanes; ++l) above[l] += maximum[m] > maximum[l];
  }
  acc_t reached = std::numeric_limits<acc_t>::infinity();
  for (int64_t l = 0; l < kLanes; ++l) {
    reached = above[l] < num_kept && maximum[l] < reached ? maximum[l] : reached;
  }
  return reached;
}

// Selects the first `num_kept` values of a row in the order of ranks_before, by insertion into a
// sorted list. In a long row, only the values that reach a bound are inserted.
struct SelectByInsertion {
  template <typename acc_t>
  MOE_EXT_KERNEL void run(const acc_t* row, int64_t size, int64_t num_kept, Ranked<acc_t>* kept) {
    acc_t bound = size >= kLanes && num_kept <= kLanes ? reached_by(row, size, num_kept)
                                                       : -std::numeric_limits<acc_t>::infinity();
    int64_t count = 0;
    // Values are offered in index order, so an equal value ranks after those in the list.
    const auto offer = [&](int64_t index) __attribute__((always_inline)) {
      const acc_t value = row[index];
      if (count == num_kept && !(value > kept[count - 1].value)) return;
      int64_t position = count == num_kept ? count - 1 : count++;
      for (; position > 0 && value > kept[position - 1].value; --position) {
        kept[position] = kept[position - 1];
      }
      kept[position] = {value, index};
      if (count == num_kept) bound = kept[count - 1].value;
    };
    const auto may_enter = [&](int64_t index) __attribute__((always_inline)) {
      return row[index] >= bound;
    };
    for_each_passing(size, may_enter, offer);
    for (int64_t i = 0; count < num_kept; ++i) {  // NaN comes last
      if (row[i] != row[i]) kept[count++] = {row[i], i};
    }
  }
};

constexpr int64_t kMaxInsertion = 64;  // above this, a heap: O(size log num_kept) for any row

template <typename acc_t>
void select(const acc_t* row, int64_t size, int64_t num_kept, std::vector<Ranked<acc_t>>& kept) {
  if (num_kept <= kMaxInsertion) {
    kept.resize(num_kept);
    return vectorized<SelectByInsertion>(row, size, num_kept, kept.data());
  }
  kept.resize(size);
  for (int64_t i = 0; i < size; ++i) kept[i] = {row[i], i};
  std::partial_sort(kept.begin(), kept.begin() + num_kept, kept.end(), ranks_before<acc_t>);
}

}  // namespace moe_ext::cpu
