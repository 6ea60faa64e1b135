// Strictly balanced gating (App. F) on the CPU: the batchwise mask, and the softmax over the
// selected experts.
#include "../kernels/balanced_gating.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "../math/balanced_gating.h"
#include "../math/gating.h"
#include "../math/order.h"
#include "parallel.h"
#include "vectorize.h"

namespace moe_ext {
namespace cpu {
namespace {

// The m-th largest key of a column, and how many keys are larger or at least as large.
template <typename key_t>
struct Cut {
  key_t key;
  int64_t num_larger;
  int64_t num_reaching;
};

template <typename key_t>
MOE_EXT_KERNEL int64_t count_at_least(const key_t* keys, int64_t size, key_t bound) {
  std::make_unsigned_t<key_t> count = 0;  // as wide as a key, so the loop vectorizes
  for (int64_t i = 0; i < size; ++i) count += keys[i] >= bound;
  return static_cast<int64_t>(count);
}

// Bisects: about 25 vectorized passes over the column, for any distribution of the scores.
struct FindCut {
  template <typename key_t>
  MOE_EXT_KERNEL void run(const key_t* keys, int64_t size, int64_t m, Cut<key_t>* cut) {
    using unsigned_t = std::make_unsigned_t<key_t>;
    key_t low = keys[0];
    key_t high = keys[0];
    for (int64_t i = 1; i < size; ++i) {
      low = keys[i] < low ? keys[i] : low;
      high = keys[i] > high ? keys[i] : high;
    }
    *cut = {.key = high, .num_larger = 0, .num_reaching = size};
    while (low < high) {
      const auto half = (static_cast<unsigned_t>(high) - static_cast<unsigned_t>(low)) / 2;
      const auto middle = static_cast<key_t>(static_cast<unsigned_t>(high) - half);
      const int64_t count = count_at_least(keys, size, middle);
      if (count >= m) {
        low = middle;
        cut->num_reaching = count;
      } else {
        high = middle - 1;
        cut->num_larger = count;
      }
    }
    cut->key = low;
  }
};

// Replaces the keys equal to `tied` by their tie breaks, and sets the other keys above or below
// them.
struct BreakTies {
  template <typename key_t>
  MOE_EXT_KERNEL void run(uint32_t column, int64_t size, key_t tied, key_t* keys) {
    for (int64_t i = 0; i < size; ++i) {
      const key_t other = keys[i] > tied ? std::numeric_limits<key_t>::max() : key_t(-1);
      const key_t order = math::tie_break(column, static_cast<uint32_t>(i));
      keys[i] = keys[i] == tied ? order : other;
    }
  }
};

// Writes the rows of the m largest keys in ascending order. Among keys equal to the cut, the lowest
// rows win.
struct RowsAbove {
  template <typename key_t>
  MOE_EXT_KERNEL void run(const key_t* keys, int64_t size, int64_t m, Cut<key_t> cut,
                          int64_t* rows) {
    int64_t num_equal = m - cut.num_larger;
    const auto reaches = [&](int64_t row) __attribute__((always_inline)) {
      return keys[row] >= cut.key;
    };
    const auto offer = [&](int64_t row) __attribute__((always_inline)) {
      if (keys[row] == cut.key && num_equal-- <= 0) return;
      *rows++ = row;
    };
    for_each_passing(size, reaches, offer);
  }
};

constexpr int64_t kTile = 16;  // columns that are processed together: one cache line of float32

// out[2j] = in[j], out[2j + 1] = in[j + half]: rotates the binary position of an element by one
// bit. Four rotations transpose a 16 x 16 tile.
template <typename key_t>
MOE_EXT_KERNEL void perfect_shuffle(const key_t* in, key_t* out) {
  constexpr int64_t kHalf = kTile * kTile / 2;
  for (int64_t j = 0; j < kHalf; ++j) {
    out[2 * j] = in[j];
    out[2 * j + 1] = in[j + kHalf];
  }
}

// Writes the keys of some columns of a matrix, column by column; column c starts at c * stride.
struct KeysOfColumns {
  template <typename scalar_t, typename key_t>
  MOE_EXT_KERNEL void run(const scalar_t* scores, int64_t num_rows, int64_t row_size,
                          int64_t num_columns, int64_t stride, key_t* keys) {
    using acc_t = acc_type<scalar_t>;
    key_t tile[kTile * kTile] = {};
    key_t other[kTile * kTile];
    const auto transpose = [&](int64_t first, int64_t rows, int64_t columns)
        __attribute__((always_inline)) {
      for (int64_t r = 0; r < rows; ++r) {
        const scalar_t* row = scores + (first + r) * row_size;
        for (int64_t c = 0; c < columns; ++c) {
          tile[r * kTile + c] = math::order_key(static_cast<acc_t>(row[c]));
        }
      }
      perfect_shuffle(tile, other);
      perfect_shuffle(other, tile);
      perfect_shuffle(tile, other);
      perfect_shuffle(other, tile);
      for (int64_t c = 0; c < columns; ++c) {
        for (int64_t r = 0; r < rows; ++r) keys[c * stride + first + r] = tile[c * kTile + r];
      }
    };
    int64_t first = 0;
    if (num_columns == kTile) {  // full tiles, whose size the compiler knows
      for (; first + kTile <= num_rows; first += kTile) transpose(first, kTile, kTile);
    }
    for (; first < num_rows; first += kTile) {
      transpose(first, std::min(kTile, num_rows - first), num_columns);
    }
  }
};

// Computes the softmax over the selected logits of one token.
struct SoftmaxOfSelected {
  template <typename scalar_t, typename acc_t>
  MOE_EXT_KERNEL void run(const scalar_t* logits, const int64_t* selected, int64_t size,
                          acc_t* gates) {
    acc_t largest = -std::numeric_limits<acc_t>::infinity();
    for (int64_t s = 0; s < size; ++s) {
      gates[s] = static_cast<acc_t>(logits[selected[s]]);
      largest = gates[s] > largest ? gates[s] : largest;
    }
    acc_t sum = 0;
    for (int64_t s = 0; s < size; ++s) {
      gates[s] = math::unnormalized_gate(gates[s], largest);
      sum += gates[s];
    }
    for (int64_t s = 0; s < size; ++s) gates[s] /= sum;
  }
};

}  // namespace
}  // namespace cpu
using namespace cpu;

template <typename scalar_t>
void BatchwiseTopM<scalar_t>::on_cpu() const {
  using key_t = decltype(math::order_key(acc_type<scalar_t>()));
  const int64_t num_blocks = (num_experts + kTile - 1) / kTile;
  // If all columns had the same alignment, they would compete for the same few cache lines.
  const int64_t stride = num_rows + kTile;
  constexpr int64_t kPasses = 4;  // cost of the bisection, in accesses to each element
  parallel_for(
      num_groups * num_blocks, kPasses * kTile * num_rows, [&](int64_t begin, int64_t end) {
        std::vector<key_t> keys(kTile * stride);
        for (int64_t block = begin; block < end; ++block) {
          const int64_t group = block / num_blocks;
          const int64_t first = block % num_blocks * kTile;
          const int64_t num_columns = std::min(kTile, num_experts - first);
          vectorized<KeysOfColumns>(scores + group * num_rows * num_experts + first, num_rows,
                                    num_experts, num_columns, stride, keys.data());
          for (int64_t c = 0; c < num_columns; ++c) {
            const int64_t column = group * num_experts + first + c;
            key_t* column_keys = keys.data() + c * stride;
            Cut<key_t> cut;
            vectorized<FindCut>(static_cast<const key_t*>(column_keys), num_rows, m, &cut);
            mth_score[column] = static_cast<scalar_t>(math::number_of_key(cut.key));
            if (cut.num_reaching > m) {
              const auto tie =
                  static_cast<uint32_t>(group * columns_of_batch + first_expert + first + c);
              vectorized<BreakTies>(tie, num_rows, cut.key, column_keys);
              vectorized<FindCut>(static_cast<const key_t*>(column_keys), num_rows, m, &cut);
            }
            vectorized<RowsAbove>(static_cast<const key_t*>(column_keys), num_rows, m, cut,
                                  row_index + column * m);
          }
        }
      });
}
MOE_EXT_DEFINE_RUN_ON_CPU(BatchwiseTopM)

template <typename scalar_t>
void SelectedSoftmax<scalar_t>::on_cpu() const {
  const int64_t work = 8 * (1 + num_selected / std::max<int64_t>(1, num_tokens));
  parallel_for(num_tokens, work, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t first = token_offsets[t];
      vectorized<SoftmaxOfSelected>(logits + t * num_experts, expert_index + first,
                                    token_offsets[t + 1] - first, gates + first);
    }
  });
}
MOE_EXT_DEFINE_RUN_ON_CPU(SelectedSoftmax)

template <typename scalar_t>
void SelectedSoftmaxBackward<scalar_t>::on_cpu() const {
  const int64_t work = 4 * (1 + num_selected / std::max<int64_t>(1, num_tokens));
  parallel_for(num_tokens, work + num_experts, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      scalar_t* row = grad_logits + t * num_experts;
      std::fill_n(row, num_experts, scalar_t(0));
      const int64_t first = token_offsets[t], last = token_offsets[t + 1];
      scalar_t mean = 0;
      for (int64_t s = first; s < last; ++s) mean += gates[s] * grad_gates[s];
      for (int64_t s = first; s < last; ++s) {
        row[expert_index[s]] += math::noisy_logit_gradient(gates[s], grad_gates[s], mean);
      }
    }
  });
}
MOE_EXT_DEFINE_ON_CPU(SelectedSoftmaxBackward<float>)
MOE_EXT_DEFINE_ON_CPU(SelectedSoftmaxBackward<double>)

}  // namespace moe_ext
