// CV(values)^2 (Eq. 7) on the CPU.
#include "../kernels/cv_squared.h"

#include <algorithm>

#include "../math/cv_squared.h"
#include "vectorize.h"

namespace moe_ext {
namespace cpu {
namespace {

struct Moments {
  template <typename scalar_t, typename acc_t>
  MOE_EXT_KERNEL void run(const scalar_t* values, int64_t size, acc_t* mean, acc_t* cv_squared) {
    const acc_t count = static_cast<acc_t>(size);
    const acc_t center =
        sum_of_terms<acc_t>(
            size, [&](int64_t i, acc_t partial) __attribute__((
                      always_inline)) { return partial + static_cast<acc_t>(values[i]); }) /
        count;
    const acc_t squares = sum_of_terms<acc_t>(
        size, [&](int64_t i, acc_t partial) __attribute__((always_inline)) {
          const acc_t u = math::relative_deviation(static_cast<acc_t>(values[i]), center);
          return partial + u * u;
        });
    *mean = center;
    *cv_squared = squares / count;
  }
};

struct Gradient {
  template <typename scalar_t, typename acc_t>
  MOE_EXT_KERNEL void run(const scalar_t* values, int64_t size, acc_t mean, acc_t cv_squared,
                          acc_t slope, scalar_t* grad) {
    for (int64_t i = 0; i < size; ++i) {
      const acc_t u = math::relative_deviation(static_cast<acc_t>(values[i]), mean);
      grad[i] = static_cast<scalar_t>((u - cv_squared) * slope);
    }
  }
};

}  // namespace
}  // namespace cpu
using namespace cpu;

template <typename scalar_t>
void CvSquared<scalar_t>::on_cpu() const {
  using acc_t = acc_type<scalar_t>;
  if (first) *result = 0;
  if (weight == 0) return;
  acc_t mean = 0, cv_squared = 0;
  vectorized<Moments>(values, size, &mean, &cv_squared);
  *result += static_cast<acc_t>(weight) * cv_squared;
}
MOE_EXT_DEFINE_RUN_ON_CPU(CvSquared)

template <typename scalar_t>
void CvSquaredBackward<scalar_t>::on_cpu() const {
  using acc_t = acc_type<scalar_t>;
  if (weight == 0) {
    std::fill_n(grad_values, size, scalar_t(0));
    return;
  }
  acc_t mean = 0, cv_squared = 0;
  vectorized<Moments>(values, size, &mean, &cv_squared);
  const acc_t slope =
      math::cv_squared_slope(static_cast<acc_t>(weight) * *grad, static_cast<acc_t>(size), mean);
  vectorized<Gradient>(values, size, mean, cv_squared, slope, grad_values);
}
MOE_EXT_DEFINE_RUN_ON_CPU(CvSquaredBackward)

}  // namespace moe_ext
