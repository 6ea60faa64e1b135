// CV(values)^2 (Eq. 7) on the CPU.
#include "../cv_squared.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include "../math/cv_squared.h"
#include "empty_rows.h"
#include "vectorize.h"

namespace moe_ext::cpu {
namespace {

struct CvSquared {
  template <typename scalar_t, typename acc_t>
  MOE_EXT_KERNEL void run(const scalar_t* values, int64_t size, acc_t* result) {
    const acc_t count = static_cast<acc_t>(size);
    const acc_t mean =
        sum_of_terms<acc_t>(
            size, [&](int64_t i, acc_t partial) __attribute__((
                      always_inline)) { return partial + static_cast<acc_t>(values[i]); }) /
        count;
    const acc_t squares = sum_of_terms<acc_t>(
        size, [&](int64_t i, acc_t partial) __attribute__((always_inline)) {
          const acc_t u = math::relative_deviation(static_cast<acc_t>(values[i]), mean);
          return partial + u * u;
        });
    *result = squares / count;
  }
};

Tensor cv_squared_cpu(const Tensor& values) {
  check_cv_squared(values);
  const Tensor contiguous = values.contiguous();
  Tensor result = cv_squared_output(empty, values);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, contiguous.scalar_type(), "cv_squared", [&] {
        using acc_t = at::opmath_type<scalar_t>;
        vectorized<CvSquared>(contiguous.const_data_ptr<scalar_t>(), contiguous.numel(),
                              result.mutable_data_ptr<acc_t>());
      });
  return result;
}

}  // namespace
}  // namespace moe_ext::cpu

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) { m.impl("cv_squared", &moe_ext::cpu::cv_squared_cpu); }
