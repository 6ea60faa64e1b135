// Elementwise kernels on contiguous numbers, and on the rows of an activation.
#pragma once

#include <ATen/OpMathType.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../math/activation.h"
#include "vectorize.h"

namespace moe_ext::cpu {

struct Convert {
  template <typename from_t, typename to_t>
  MOE_EXT_KERNEL void run(const from_t* from, int64_t size, to_t* to) {
    for (int64_t i = 0; i < size; ++i) to[i] = static_cast<to_t>(from[i]);
  }
};

struct Add {
  template <typename from_t, typename to_t>
  MOE_EXT_KERNEL void run(const from_t* from, int64_t size, to_t* sum) {
    for (int64_t i = 0; i < size; ++i) sum[i] += static_cast<to_t>(from[i]);
  }
};

// Adds by groups of rows: a long sum of small numbers to a large one would lose them.
struct SumOfRows {
  template <typename acc_t>
  MOE_EXT_KERNEL void run(const acc_t* rows, int64_t num_rows, int64_t width, acc_t* group,
                          acc_t* sum) {
    constexpr int64_t kGroup = 32;
    std::fill_n(sum, width, acc_t(0));
    for (int64_t first = 0; first < num_rows; first += kGroup) {
      std::fill_n(group, width, acc_t(0));
      for (int64_t r = first; r < std::min(num_rows, first + kGroup); ++r) {
        for (int64_t i = 0; i < width; ++i) group[i] += rows[r * width + i];
      }
      for (int64_t i = 0; i < width; ++i) sum[i] += group[i];
    }
  }
};

struct Scale {
  template <typename acc_t>
  MOE_EXT_KERNEL void run(acc_t scale, int64_t size, acc_t* row) {
    for (int64_t i = 0; i < size; ++i) row[i] *= scale;
  }
};

struct Dot {
  template <typename acc_t, typename scalar_t>
  MOE_EXT_KERNEL void run(const acc_t* a, const scalar_t* b, int64_t size, acc_t* product) {
    *product = sum_of_terms<acc_t>(
        size, [&](int64_t i, acc_t partial) __attribute__((always_inline)) {
          return std::fma(a[i], static_cast<acc_t>(b[i]), partial);
        });
  }
};

template <typename Activation>
struct Activate {
  template <typename scalar_t>
  MOE_EXT_KERNEL void run(const scalar_t* z, int64_t num_rows, int64_t width, scalar_t* out) {
    using acc_t = at::opmath_type<scalar_t>;
    const auto wide = [&](int64_t i) __attribute__((always_inline)) {
      return static_cast<acc_t>(z[i]);
    };
    if constexpr (Activation::kGated) {
      for (int64_t r = 0; r < num_rows; ++r, z += 2 * width, out += width) {
        for (int64_t i = 0; i < width; ++i) {
          out[i] = static_cast<scalar_t>(Activation::value(wide(i)) * wide(width + i));
        }
      }
    } else {
      for (int64_t i = 0; i < num_rows * width; ++i) {
        out[i] = static_cast<scalar_t>(Activation::value(wide(i)));
      }
    }
  }
};

template <typename Activation>
struct ActivateBackward {
  template <typename scalar_t, typename acc_t>
  MOE_EXT_KERNEL void run(const scalar_t* z, const acc_t* grad, int64_t num_rows, int64_t width,
                          acc_t* grad_z) {
    const auto wide = [&](int64_t i) __attribute__((always_inline)) {
      return static_cast<acc_t>(z[i]);
    };
    if constexpr (Activation::kGated) {
      for (int64_t r = 0; r < num_rows; ++r, z += 2 * width, grad_z += 2 * width, grad += width) {
        for (int64_t i = 0; i < width; ++i) {
          grad_z[i] = grad[i] * wide(width + i) * Activation::derivative(wide(i));
          grad_z[width + i] = grad[i] * Activation::value(wide(i));
        }
      }
    } else {
      for (int64_t i = 0; i < num_rows * width; ++i) {
        grad_z[i] = grad[i] * Activation::derivative(wide(i));
      }
    }
  }
};

}  // namespace moe_ext::cpu
