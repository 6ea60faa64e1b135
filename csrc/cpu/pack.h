// Panels of a matrix product's factors, widened to the type that is computed with.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "micro_kernels.h"
#include "vectorize.h"

namespace moe_ext::cpu {

// Writes a panel of num_columns (<= width) by depth numbers, zeros after num_columns; width is a
// multiple of the lanes of a vector of kBytes.
template <int kBytes>
struct PackPanel {
  template <typename acc_t>
  struct Of {
    static constexpr int kLanes = kBytes / sizeof(acc_t);
    using Index = std::conditional_t<sizeof(acc_t) == 4, int32_t, int64_t>;
    typedef acc_t Vector __attribute__((vector_size(kBytes)));
    typedef Index Mask __attribute__((vector_size(kBytes)));

    // Exchanges the off-diagonal quarters of blocks of 2 * kStep lanes: log2(kLanes) times over, a
    // transposition.
    template <int kStep>
    MOE_EXT_KERNEL void exchange(Vector* rows) {
      Mask low, high;
      MOE_EXT_UNROLL for (int l = 0; l < kLanes; ++l) {
        low[l] = l & kStep ? kLanes + l - kStep : l;
        high[l] = l & kStep ? kLanes + l : l + kStep;
      }
      MOE_EXT_UNROLL for (int r = 0; r < kLanes; ++r) {
        if (r & kStep) continue;
        const Vector a = rows[r], b = rows[r + kStep];
        rows[r] = __builtin_shuffle(a, b, low);
        rows[r + kStep] = __builtin_shuffle(a, b, high);
      }
    }

    MOE_EXT_KERNEL void transpose(Vector* rows) {
      if constexpr (kLanes > 1) exchange<1>(rows);
      if constexpr (kLanes > 2) exchange<2>(rows);
      if constexpr (kLanes > 4) exchange<4>(rows);
      if constexpr (kLanes > 8) exchange<8>(rows);
    }

    template <typename from_t>
    MOE_EXT_KERNEL void load(const from_t* from, Vector& to) {
      if constexpr (std::is_same_v<from_t, acc_t>) {
        std::memcpy(&to, from, kBytes);
      } else {
        acc_t wide alignas(kBytes)[kLanes];
        for (int l = 0; l < kLanes; ++l) wide[l] = static_cast<acc_t>(from[l]);
        std::memcpy(&to, wide, kBytes);
      }
    }

    // The lanes from `size` on are zero.
    template <typename from_t>
    MOE_EXT_KERNEL void load(const from_t* from, int64_t size, Vector& to) {
      acc_t wide alignas(kBytes)[kLanes];
      for (int64_t l = 0; l < kLanes; ++l)
        wide[l] = l < size ? static_cast<acc_t>(from[l]) : acc_t(0);
      std::memcpy(&to, wide, kBytes);
    }
  };

  // One panel: `columns` <= width of them.
  template <typename acc_t, typename from_t>
  MOE_EXT_KERNEL void transposed(const from_t* from, int64_t stride, int64_t num_columns,
                                 int64_t depth, int64_t width, acc_t* to) {
    using V = Of<acc_t>;
    using Vector = typename V::Vector;
    constexpr int64_t kLanes = V::kLanes;
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t columns = std::clamp<int64_t>(num_columns - i, 1, kLanes);
      const from_t* rows = from + i * stride;
      for (int64_t p = 0; p < depth; p += kLanes) {
        const int64_t size = std::min(depth - p, kLanes);
        Vector block[kLanes];
        if (size == kLanes) {
          MOE_EXT_UNROLL for (int64_t r = 0; r < kLanes; ++r) {
            V::load(rows + std::min(r, columns - 1) * stride + p, block[r]);
          }
          V::transpose(block);
          MOE_EXT_UNROLL for (int64_t q = 0; q < kLanes; ++q) {
            *reinterpret_cast<Vector*>(to + (p + q) * width + i) = block[q];
          }
        } else {
          for (int64_t r = 0; r < kLanes; ++r) {
            V::load(rows + r * stride + p, r < columns ? size : 0, block[r]);
          }
          V::transpose(block);
          for (int64_t q = 0; q < size; ++q) {
            *reinterpret_cast<Vector*>(to + (p + q) * width + i) = block[q];
          }
        }
      }
    }
  }

  template <typename acc_t, typename from_t>
  MOE_EXT_KERNEL void run(const from_t* from, int64_t stride, bool depth_contiguous,
                          int64_t num_columns, int64_t depth, int64_t width, acc_t* to) {
    using V = Of<acc_t>;
    constexpr int64_t kLanes = V::kLanes;
    if (depth_contiguous) {
      for (int64_t i = 0; i < num_columns; i += width) {
        const int64_t columns = std::min(num_columns - i, width);
        transposed(from + i * stride, stride, columns, depth, width, to + i * depth);
      }
      return;
    }
    for (int64_t p = 0; p < depth; ++p) {
      const from_t* row = from + p * stride;
      for (int64_t i = 0; i < num_columns; i += width) {
        const int64_t columns = std::min(num_columns - i, width);
        acc_t* panel = to + i * depth + p * width;
        for (int64_t l = 0; l < width; l += kLanes) {
          typename V::Vector vector;
          if (columns - l >= kLanes) {
            V::load(row + i + l, vector);
          } else {
            V::load(row + i + l, columns - l, vector);
          }
          *reinterpret_cast<typename V::Vector*>(panel + l) = vector;
        }
      }
    }
  }
};

template <typename acc_t, typename from_t>
void pack_panels(const from_t* from, int64_t stride, bool depth_contiguous, int64_t num_columns,
                 int64_t depth, int64_t width, acc_t* to) {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::kAvx512:
      return run_avx512<PackPanel<64>>(from, stride, depth_contiguous, num_columns, depth, width,
                                       to);
    case Isa::kAvx2:
      return run_avx2<PackPanel<32>>(from, stride, depth_contiguous, num_columns, depth, width, to);
    case Isa::kDefault:
      break;
  }
#endif
  PackPanel<16>::run(from, stride, depth_contiguous, num_columns, depth, width, to);
}

}  // namespace moe_ext::cpu
