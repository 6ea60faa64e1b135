// Elementwise kernels on contiguous arrays, and on regions of row-major matrices.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../kernels/types.h"
#include "../math/activation.h"
#include "region.h"
#include "vectorize.h"

namespace moe_ext::cpu {

struct Convert {
  template <typename from_t, typename to_t>
  MOE_EXT_KERNEL void run(const from_t* from, int64_t size, to_t* to) {
    for (int64_t i = 0; i < size; ++i) to[i] = static_cast<to_t>(from[i]);
  }
};

// Writes 0 where the mask is false.
struct Masked {
  template <typename scalar_t>
  MOE_EXT_KERNEL void run(const scalar_t* from, const bool* mask, int64_t size, scalar_t* to) {
    for (int64_t i = 0; i < size; ++i) to[i] = mask[i] ? from[i] : scalar_t(0);
  }
};

struct Add {
  template <typename from_t, typename to_t>
  MOE_EXT_KERNEL void run(const from_t* from, int64_t size, to_t* sum) {
    for (int64_t i = 0; i < size; ++i) sum[i] += static_cast<to_t>(from[i]);
  }
};

// Sums rows in groups: a single long sum would round away small terms.
struct SumOfRows {
  template <typename from_t, typename acc_t>
  MOE_EXT_KERNEL void run(const from_t* rows, int64_t num_rows, int64_t width, acc_t* group,
                          acc_t* sum) {
    constexpr int64_t kGroup = 32;
    std::fill_n(sum, width, acc_t(0));
    for (int64_t first = 0; first < num_rows; first += kGroup) {
      std::fill_n(group, width, acc_t(0));
      for (int64_t r = first; r < std::min(num_rows, first + kGroup); ++r) {
        for (int64_t i = 0; i < width; ++i) group[i] += static_cast<acc_t>(rows[r * width + i]);
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

struct SumOfLanes {
  template <typename acc_t>
  MOE_EXT_KERNEL void run(acc_t* lanes, acc_t* sum) {
    *sum = sum_of_lanes(lanes);
  }
};

// Kernels on regions of matrices with rows of `width` elements. `sums` are those of a region alone:
// its first element is the first of the region, and its rows are `ld` apart.

// Writes the sums of a region to a matrix.
struct ConvertRegion {
  template <typename from_t, typename to_t>
  MOE_EXT_KERNEL void run(const from_t* sums, int64_t ld, Region region, int64_t width, to_t* to) {
    to += region.row * width + region.column;
    for (int64_t r = 0; r < region.num_rows; ++r) {
      Convert::run(sums + r * ld, region.num_columns, to + r * width);
    }
  }
};

struct ScaleRegion {
  template <typename acc_t>
  MOE_EXT_KERNEL void run(const acc_t* scale, Region region, int64_t ld, acc_t* sums) {
    for (int64_t r = 0; r < region.num_rows; ++r) {
      Scale::run(scale[region.row + r], region.num_columns, sums + r * ld);
    }
  }
};

// Adds a row's products with the matrix b to its kLanes partial sums. The result equals Dot if the
// regions of a row come in order.
struct DotRegion {
  template <typename acc_t, typename scalar_t>
  MOE_EXT_KERNEL void run(const acc_t* sums, int64_t ld, const scalar_t* b, Region region,
                          int64_t width, acc_t* lanes) {
    const int64_t end = region.column + region.num_columns;
    for (int64_t r = region.row; r < region.row + region.num_rows; ++r) {
      const acc_t* a = sums + (r - region.row) * ld;
      const scalar_t* row = b + r * width;
      int64_t i = region.column;
      if (i % kLanes == 0 && i + kLanes <= end) {  // the same loop in registers
        acc_t lane[kLanes];
        std::copy_n(lanes + r * kLanes, kLanes, lane);
        for (; i + kLanes <= end; i += kLanes) {
          for (int64_t l = 0; l < kLanes; ++l) {
            lane[l] = std::fma(a[i - region.column + l], static_cast<acc_t>(row[i + l]), lane[l]);
          }
        }
        std::copy_n(lane, kLanes, lanes + r * kLanes);
      }
      while (i < end) {
        acc_t* lane = lanes + r * kLanes + i % kLanes;
        const int64_t size = std::min(end - i, kLanes - i % kLanes);
        for (int64_t l = 0; l < size; ++l) {
          lane[l] = std::fma(a[i - region.column + l], static_cast<acc_t>(row[i + l]), lane[l]);
        }
        i += size;
      }
    }
  }
};

// The columns of z with the pre-activations a and b of activation i. Without gates, b is a.
template <typename Activation>
class Columns {
 public:
  MOE_EXT_INLINE explicit Columns(int64_t width)
      : width_z(Activation::kGated ? 2 * width : width),
        distance_(Activation::kInterleaved ? 1 : width_z - width) {}

  MOE_EXT_INLINE int64_t a(int64_t i) const { return kStride * i; }
  MOE_EXT_INLINE int64_t b(int64_t i) const { return kStride * i + distance_; }

  // Returns the number of activations whose b is in a column before `end`.
  MOE_EXT_INLINE int64_t num_completed(int64_t end) const {
    return std::max((end - distance_ + kStride - 1) / kStride, int64_t{0});
  }

  const int64_t width_z;

 private:
  static constexpr int64_t kStride = Activation::kInterleaved ? 2 : 1;
  const int64_t distance_;
};

// Computes the activations that a region of the hidden layer z completes. `width` is the width of
// the activations.
struct Activate {
  template <typename Activation, typename scalar_t>
  MOE_EXT_KERNEL void run(Activation activation, const scalar_t* z, Region region, int64_t width,
                          scalar_t* out) {
    using acc_t = acc_type<scalar_t>;
    const Columns<Activation> columns(width);
    const int64_t begin = columns.num_completed(region.column);
    const int64_t end = columns.num_completed(region.column + region.num_columns);
    for (int64_t r = region.row; r < region.row + region.num_rows; ++r) {
      const scalar_t* from = z + r * columns.width_z;
      scalar_t* to = out + r * width;
      const auto wide = [&](int64_t i) __attribute__((always_inline)) {
        return static_cast<acc_t>(from[i]);
      };
      MOE_EXT_NO_ALIAS for (int64_t i = begin; i < end; ++i) {  // z may equal out
        acc_t value;
        if constexpr (Activation::kGated) {
          value = activation.value(wide(columns.a(i)), wide(columns.b(i)));
        } else {
          value = activation.value(wide(i));
        }
        to[i] = static_cast<scalar_t>(value);
      }
    }
  }
};

// Computes the gradient with respect to z from the sums of a region of the activations' gradient.
struct ActivateBackward {
  template <typename Activation, typename scalar_t, typename acc_t>
  MOE_EXT_KERNEL void run(Activation activation, const scalar_t* z, const acc_t* sums, int64_t ld,
                          Region region, int64_t width, acc_t* grad_z) {
    const Columns<Activation> columns(width);
    const int64_t end = region.column + region.num_columns;
    for (int64_t r = region.row; r < region.row + region.num_rows; ++r) {
      const scalar_t* from = z + r * columns.width_z;
      const acc_t* grad_row = sums + (r - region.row) * ld;
      acc_t* to = grad_z + r * columns.width_z;
      const auto wide = [&](int64_t i) __attribute__((always_inline)) {
        return static_cast<acc_t>(from[i]);
      };
      MOE_EXT_NO_ALIAS for (int64_t i = region.column; i < end; ++i) {  // sums may be in grad_z
        if constexpr (Activation::kGated) {
          const int64_t a = columns.a(i), b = columns.b(i);
          const math::Pair<acc_t> gradient =
              activation.gradient(grad_row[i - region.column], wide(a), wide(b));
          to[a] = gradient.a;
          to[b] = gradient.b;
        } else {
          to[i] = activation.gradient(grad_row[i - region.column], wide(i));
        }
      }
    }
  }
};

}  // namespace moe_ext::cpu
