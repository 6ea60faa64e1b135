#include "slots.h"

#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "elementwise.h"
#include "vectorize.h"

namespace moe_ext {
namespace cpu {
namespace {

struct AddScaledRow {
  template <typename scalar_t, typename acc_t>
  MOE_EXT_KERNEL void run(acc_t scale, const scalar_t* row, int64_t size, acc_t* sum) {
    for (int64_t d = 0; d < size; ++d) {
      sum[d] = std::fma(scale, static_cast<acc_t>(row[d]), sum[d]);
    }
  }
};

}  // namespace
}  // namespace cpu
using namespace cpu;

template <typename scalar_t>
void RowsOfSlots<scalar_t>::on_cpu() const {
  if (slots.num_slots == 0 || width == 0) return;  // memcpy must not get a null pointer
  // Iterates over tokens, not rows: a token is read from memory once, then from the cache.
  for_tokens(slots, width, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t slot = slots.begin(t); slot < slots.end(t); ++slot) {
        std::memcpy(rows + slots.row(slot) * width, x + t * width, width * sizeof(scalar_t));
      }
    }
  });
}
MOE_EXT_DEFINE_RUN_ON_CPU(RowsOfSlots)

template <typename scalar_t>
void SumOverSlots<scalar_t>::on_cpu() const {
  using acc_t = acc_type<scalar_t>;
  constexpr bool kSame = std::is_same_v<scalar_t, acc_t>;
  for_tokens(slots, width, [&](int64_t begin, int64_t end) {
    std::vector<acc_t> wide(kSame ? 0 : width);
    for (int64_t t = begin; t < end; ++t) {
      auto* row = sums + t * width;
      auto* sum = kSame ? reinterpret_cast<acc_t*>(row) : wide.data();
      std::fill_n(sum, width, acc_t(0));
      for (int64_t slot = slots.begin(t); slot < slots.end(t); ++slot) {
        const acc_t weight = weights != nullptr ? weights[slot] : acc_t(1);
        vectorized<AddScaledRow>(weight, rows + slots.row(slot) * width, width, sum);
      }
      if (!kSame) vectorized<Convert>(static_cast<const acc_t*>(sum), width, row);
    }
  });
}
MOE_EXT_DEFINE_RUN_ON_CPU(SumOverSlots)

}  // namespace moe_ext
