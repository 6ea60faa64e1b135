// Packing: copies parts of A and B into micro-panels of the K-groups that micro_kernels.h defines.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../../kernels/types.h"
#include "../vectorize.h"
#include "micro_kernels.h"

namespace moe_ext::cpu {

// Vectors of kBytes whose K-groups are single numbers.
template <int kBytes, typename acc_t>
struct Groups {
  static constexpr int kLanes = kBytes / sizeof(acc_t);
  static constexpr int kNumbers = 1;  // in a K-group
  using Index = std::conditional_t<sizeof(acc_t) == 4, int32_t, int64_t>;
  typedef acc_t Vector __attribute__((vector_size(kBytes)));
  typedef std::make_unsigned_t<Index> Bits __attribute__((vector_size(kBytes)));

  // Loads the next kLanes numbers.
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

  // Loads K-groups along a row.
  template <typename from_t>
  MOE_EXT_KERNEL void load_along(const from_t* row, Vector& to) {
    load(row, to);
  }

  // Loads K-groups across kNumbers rows.
  template <typename from_t>
  MOE_EXT_KERNEL void load_across(const from_t* row, int64_t stride, Vector& to) {
    load(row, to);
  }

  // Makes K-groups of kNumbers rows, each with kLanes groups of kNumbers adjacent numbers. Vector i
  // of the result has the K-groups of columns i * kLanes and later.
  MOE_EXT_KERNEL void join_rows(Vector* /*rows*/) {}

  // Transposes blocks of kSize by kSize numbers. Each of the first kSize vectors has one row of
  // each block. Interleaves, log2(kSize) times, the rows of the first half with the rows of the
  // second. Each time, the highest bit of the row index becomes the lowest bit of the lane index.
  // The highest bit of the lane index becomes the lowest bit of the row index.
  template <int kSize = kLanes>
  MOE_EXT_KERNEL void transpose(Vector* rows) {
    MOE_EXT_UNROLL for (int step = 1; step < kSize; step *= 2) {
      Vector from[kSize];
      MOE_EXT_UNROLL for (int r = 0; r < kSize; ++r) from[r] = rows[r];
      MOE_EXT_UNROLL for (int r = 0; r < kSize / 2; ++r) {
        interleave<kSize>(from[r], from[r + kSize / 2], rows + 2 * r,
                          std::make_integer_sequence<int, kLanes>());
      }
    }
  }

 private:
  template <int kSize, int... lane>
  MOE_EXT_KERNEL void interleave(const Vector& a, const Vector& b, Vector* to,
                                 std::integer_sequence<int, lane...>) {
    constexpr auto from = [](int to) {
      return to / kSize * kSize + to % kSize / 2 + to % 2 * kLanes;
    };
    to[0] = __builtin_shufflevector(a, b, from(lane)...);
    to[1] = __builtin_shufflevector(a, b, (from(lane) + kSize / 2)...);
  }
};

// Vectors of kBytes whose K-groups are pairs of bfloat16 numbers.
template <int kBytes>
struct Pairs : Groups<kBytes, float> {
  using Base = Groups<kBytes, float>;
  using Base::kLanes;
  using typename Base::Bits;
  using typename Base::Vector;
  static constexpr int kNumbers = 2;

  // Rounds to the nearest bfloat16, in the upper half of each lane; NaN stays NaN.
  MOE_EXT_KERNEL void round(const Vector& from, Bits& to) {
    const Bits bits = __builtin_bit_cast(Bits, from);
    const Bits nearest = bits + 0x7fff + ((bits >> 16) & 1);
    to = (bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : nearest;
  }

  MOE_EXT_KERNEL void join(const Vector& even, const Vector& odd, Vector& to) {
    Bits low, high;
    round(even, low);
    round(odd, high);
    const Bits words = (low >> 16) | (high & 0xffff0000);
    std::memcpy(&to, &words, kBytes);
  }

  template <typename from_t>
  MOE_EXT_KERNEL void load_along(const from_t* row, Vector& to) {
    if constexpr (std::is_same_v<from_t, c10::BFloat16>) {
      std::memcpy(&to, row, kBytes);
    } else {
      Vector first, second;
      Base::load(row, first);
      Base::load(row + kLanes, second);
      Vector even, odd;
      deinterleave(first, second, even, odd, std::make_integer_sequence<int, kLanes>());
      join(even, odd, to);
    }
  }

  template <typename from_t>
  MOE_EXT_KERNEL void load_across(const from_t* row, int64_t stride, Vector& to) {
    if constexpr (std::is_same_v<from_t, c10::BFloat16>) {
      uint32_t words alignas(kBytes)[kLanes];
      for (int l = 0; l < kLanes; ++l) words[l] = row[l].x | uint32_t{row[stride + l].x} << 16;
      std::memcpy(&to, words, kBytes);
    } else {
      Vector even, odd;
      Base::load(row, even);
      Base::load(row + stride, odd);
      join(even, odd, to);
    }
  }

  MOE_EXT_KERNEL void join_rows(Vector* rows) {
    Halves first, second;
    std::memcpy(&first, &rows[0], kBytes);
    std::memcpy(&second, &rows[1], kBytes);
    join_halves(first, second, rows, std::make_integer_sequence<int, 2 * kLanes>());
  }

 private:
  typedef uint16_t Halves __attribute__((vector_size(kBytes)));

  template <int... half>
  MOE_EXT_KERNEL void join_halves(const Halves& first, const Halves& second, Vector* to,
                                  std::integer_sequence<int, half...>) {
    const Halves low =
        __builtin_shufflevector(first, second, (half / 2 + half % 2 * 2 * kLanes)...);
    const Halves high =
        __builtin_shufflevector(first, second, (half / 2 + half % 2 * 2 * kLanes + kLanes)...);
    std::memcpy(&to[0], &low, kBytes);
    std::memcpy(&to[1], &high, kBytes);
  }

  template <int... lane>
  MOE_EXT_KERNEL void deinterleave(const Vector& first, const Vector& second, Vector& even,
                                   Vector& odd, std::integer_sequence<int, lane...>) {
    even = __builtin_shufflevector(first, second, (2 * lane)...);
    odd = __builtin_shufflevector(first, second, (2 * lane + 1)...);
  }
};

template <bool pairs, int kBytes, typename acc_t>
using GroupsOf = std::conditional_t<pairs, Pairs<kBytes>, Groups<kBytes, acc_t>>;

// Packs a micro-panel of `width` columns and num_groups K-groups. The source has num_columns
// columns of `depth` numbers. The other columns of the micro-panel are arbitrary; the numbers after
// `depth` are zero. K-group q of column i is at q * width + i. With by_columns, the micro-panel has
// blocks of kLanes K-groups, and the K-group is at q / kLanes * kLanes * width + i * kLanes + q %
// kLanes.
template <typename groups_t>
struct PackMicroPanel {
  using Vector = typename groups_t::Vector;
  static constexpr int64_t kLanes = groups_t::kLanes;
  static constexpr int64_t kNumbers = groups_t::kNumbers;

  // Loads a block of kLanes K-groups by kLanes columns, column by column. The source has
  // num_columns columns with at least kLanes K-groups each.
  template <typename from_t>
  MOE_EXT_KERNEL void load_deep_columns(const from_t* from, int64_t stride, int64_t num_columns,
                                        Vector* block) {
    MOE_EXT_UNROLL for (int64_t r = 0; r < kLanes; ++r) {
      groups_t::load_along(from + std::min(r, num_columns - 1) * stride, block[r]);
    }
  }

  // The same for columns of only `depth` numbers, which are fewer.
  template <typename from_t>
  MOE_EXT_KERNEL void load_shallow_columns(const from_t* from, int64_t stride, int64_t num_columns,
                                           int64_t depth, Vector* block) {
    for (int64_t r = 0; r < kLanes; ++r) {
      from_t numbers[kLanes * kNumbers] = {};
      if (r < num_columns) std::copy_n(from + r * stride, depth, numbers);
      groups_t::load_along(numbers, block[r]);
    }
  }

  // Loads one K-group of each column; the source has `depth` numbers of each.
  template <typename from_t>
  MOE_EXT_KERNEL void load_row(const from_t* from, int64_t stride, int64_t num_columns,
                               int64_t depth, Vector& groups) {
    if (num_columns >= kLanes && depth >= kNumbers) {
      groups_t::load_across(from, stride, groups);
      return;
    }
    from_t numbers[kNumbers * kLanes] = {};
    for (int64_t p = 0; p < std::min(depth, kNumbers); ++p) {
      std::copy_n(from + p * stride, std::min(num_columns, kLanes), numbers + p * kLanes);
    }
    groups_t::load_across(numbers, kLanes, groups);
  }

  // Packs 2 kLanes columns whose rows are contiguous: a cache line of each of two rows at a time.
  template <typename acc_t, typename from_t>
  MOE_EXT_KERNEL void pack_two_lines(const from_t* from, int64_t stride, int64_t depth,
                                     int64_t num_groups, int64_t width, acc_t* to) {
    int64_t q = 0;
    for (; q < depth / kNumbers; ++q, from += kNumbers * stride) {
      Vector rows[kNumbers];
      std::memcpy(&rows[0], from, sizeof(Vector));
      std::memcpy(&rows[1], from + stride, sizeof(Vector));
      groups_t::join_rows(rows);
      std::memcpy(to + q * width, &rows[0], sizeof(Vector));
      std::memcpy(to + q * width + kLanes, &rows[1], sizeof(Vector));
    }
    for (; q < num_groups; ++q, from += kNumbers * stride) {
      for (int64_t half = 0; half < kNumbers; ++half) {
        Vector groups;
        load_row(from + half * kLanes, stride, kLanes, depth - q * kNumbers, groups);
        std::memcpy(to + q * width + half * kLanes, &groups, sizeof(Vector));
      }
    }
  }

  // Packs up to kLanes columns whose rows are contiguous, a K-group of each column at a time.
  template <typename acc_t, typename from_t>
  MOE_EXT_KERNEL void pack_across(const from_t* from, int64_t stride, int64_t num_columns,
                                  int64_t depth, int64_t num_groups, int64_t width, acc_t* to) {
    const int64_t whole = num_columns >= kLanes ? depth / kNumbers : 0;
    for (int64_t q = 0; q < num_groups; ++q) {
      const from_t* row = from + q * kNumbers * stride;
      Vector groups;
      if (q < whole) {
        groups_t::load_across(row, stride, groups);
      } else {
        load_row(row, stride, num_columns, depth - q * kNumbers, groups);
      }
      std::memcpy(to + q * width, &groups, sizeof(Vector));
    }
  }

  // Packs up to kLanes columns that are contiguous along K.
  template <typename acc_t, typename from_t>
  MOE_EXT_KERNEL void pack_along(const from_t* from, int64_t stride, int64_t num_columns,
                                 int64_t depth, int64_t num_groups, int64_t width, acc_t* to) {
    int64_t q = 0;
    for (; depth - q * kNumbers >= kLanes * kNumbers; q += kLanes) {
      // The usual case: the block stays in registers.
      Vector block[kLanes];
      load_deep_columns(from + q * kNumbers, stride, num_columns, block);
      groups_t::transpose(block);
      MOE_EXT_UNROLL for (int64_t r = 0; r < kLanes; ++r) {
        std::memcpy(to + (q + r) * width, &block[r], sizeof(Vector));
      }
    }
    for (; q < num_groups; q += kLanes) {
      Vector block[kLanes];
      load_shallow_columns(from + q * kNumbers, stride, num_columns, depth - q * kNumbers, block);
      groups_t::transpose(block);
      for (int64_t r = 0; r < std::min(num_groups - q, kLanes); ++r) {
        std::memcpy(to + (q + r) * width, &block[r], sizeof(Vector));
      }
    }
  }

  // Packs up to kLanes columns as blocks of columns.
  template <typename acc_t, typename from_t>
  MOE_EXT_KERNEL void pack_by_columns(const from_t* from, int64_t stride, bool depth_contiguous,
                                      int64_t num_columns, int64_t depth, int64_t num_groups,
                                      int64_t width, acc_t* to) {
    for (int64_t q = 0; q < num_groups; q += kLanes) {
      const int64_t p = q * kNumbers;
      Vector block[kLanes];
      if (depth_contiguous && depth - p >= kLanes * kNumbers) {
        load_deep_columns(from + p, stride, num_columns, block);
      } else if (depth_contiguous) {
        load_shallow_columns(from + p, stride, num_columns, depth - p, block);
      } else {
        for (int64_t r = 0; r < kLanes; ++r) {
          const int64_t row = p + r * kNumbers;
          load_row(from + row * stride, stride, num_columns, depth - row, block[r]);
        }
        groups_t::transpose(block);
      }
      std::memcpy(to + q * width, block, sizeof(block));
    }
  }

  template <typename acc_t, typename from_t>
  MOE_EXT_KERNEL void run(const from_t* from, int64_t stride, bool depth_contiguous,
                          int64_t num_columns, int64_t depth, int64_t num_groups, int64_t width,
                          bool by_columns, acc_t* to) {
    int64_t i = 0;
    if constexpr (kNumbers == 2 && sizeof(from_t) == 2) {
      for (; !depth_contiguous && !by_columns && i + 2 * kLanes <= num_columns; i += 2 * kLanes) {
        pack_two_lines(from + i, stride, depth, num_groups, width, to + i);
      }
    }
    for (; i < num_columns; i += kLanes) {
      const from_t* first = depth_contiguous ? from + i * stride : from + i;
      const int64_t left = num_columns - i;
      if (by_columns) {
        pack_by_columns(first, stride, depth_contiguous, left, depth, num_groups, width,
                        to + i * kLanes);
      } else if (depth_contiguous) {
        pack_along(first, stride, left, depth, num_groups, width, to + i);
      } else {
        pack_across(first, stride, left, depth, num_groups, width, to + i);
      }
    }
  }
};

}  // namespace moe_ext::cpu
