#include "slots.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>

#include <cmath>
#include <type_traits>
#include <vector>

#include "elementwise.h"
#include "vectorize.h"

namespace moe_ext::cpu {
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

void sum_of_rows(const Tensor& rows, const Slots& slots, const Tensor& weights,
                 const Tensor& sums) {
  const int64_t width = rows.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.scalar_type(), "sum_of_rows", [&] {
    using acc_t = at::opmath_type<scalar_t>;
    constexpr bool kSame = std::is_same_v<scalar_t, acc_t>;
    const auto* rows_data = rows.const_data_ptr<scalar_t>();
    const auto* weights_data = weights.defined() ? weights.const_data_ptr<acc_t>() : nullptr;
    auto* sums_data = sums.mutable_data_ptr<scalar_t>();
    slots.for_tokens(width, [&](int64_t begin, int64_t end) {
      std::vector<acc_t> wide(kSame ? 0 : width);
      for (int64_t t = begin; t < end; ++t) {
        auto* row = sums_data + t * width;
        auto* sum = kSame ? reinterpret_cast<acc_t*>(row) : wide.data();
        std::fill_n(sum, width, acc_t(0));
        for (int64_t slot = slots.begin(t); slot < slots.end(t); ++slot) {
          const acc_t weight = weights_data != nullptr ? weights_data[slot] : acc_t(1);
          vectorized<AddScaledRow>(weight, rows_data + slots.row(slot) * width, width, sum);
        }
        if (!kSame) vectorized<Convert>(static_cast<const acc_t*>(sum), width, row);
      }
    });
  });
}

}  // namespace moe_ext::cpu
