// The loops of the integer kernels. The source file of each instruction set includes this header
// after it has defined MOE_EXT_TARGET.
//
// `Simd` describes the instruction set:
//   kBytes: the size of a vector in bytes
//   dot: adds the products of the four bytes of each lane, unsigned codes times signed numbers
//   look_up: the byte of a table of 16 for each byte below 16
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "integer.h"
#include "prefetch_ahead.h"
#include "unpacked_values.h"

namespace moe_ext::cpu {
namespace {

// C of some rows and of one panel. `ahead` is the part of the panels that is prefetched meanwhile.
template <typename Simd, Codes codes, Scales scales, bool looks_up, int kRows>
MOE_EXT_TARGET MOE_EXT_KERNEL void multiply_integers(const PackedLayout& layout,
                                                     const IntegerCodes& integers,
                                                     const uint8_t* panel, Ahead ahead,
                                                     const IntegerRows& a, int64_t first_row,
                                                     bool add, float* c, int64_t ldc) {
  using Values = Unpacking<Simd>;
  using Vector = typename Values::Vector;
  using Bits = typename Values::Bits;
  using Integers = typename Values::Integers;
  constexpr int kVectors = Values::kVectors;
  constexpr bool kHasMinima = scales == Scales::kUint8AndMinOfBlocks;
  // Two chains of products for each sum hide their latency.
  constexpr int kChains = kVectors == 1 && kRows <= 4 ? 2 : 1;
  // The segments of the formats of files, which have groups of 16 or 32.
  constexpr int64_t kUnits = codes == Codes::kSixBits ? 2 : 4;
  uint8_t table alignas(64)[64];
  if constexpr (looks_up) {
    for (int i = 0; i < 64; ++i) table[i] = integers.table[i % 16];
  }
  const uint8_t* high_bits = panel + layout.high_bits();
  const int64_t num_units = (layout.inputs + kPackedInputs - 1) / kPackedInputs;
  const int64_t units_of_segment = a.segment / kPackedInputs;
  const int64_t segments_of_group = (layout.group + a.segment - 1) / a.segment;
  const int8_t* numbers = a.numbers + first_row * a.ld;
  const float* scales_of_a = a.scales + first_row * a.num_segments;
  const int32_t* offsets = a.offsets + first_row * a.num_segments;
  const float* totals = a.totals + first_row * a.num_segments;
  Vector sum[kRows][kVectors] = {};
  const auto multiply_segment = [&](int64_t segment, int64_t unit, auto units, const Vector* scale,
                                    const Vector* minimum) __attribute__((always_inline))
  MOE_EXT_TARGET {
    ahead.prefetch();
    Integers total[kChains][kRows][kVectors] = {};
    if constexpr (!kHasMinima) {
      MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
        const int32_t offset = offsets[r * a.num_segments + segment];
        MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) total[0][r][v] = Integers{} + offset;
      }
    }
    const auto multiply_unit = [&](int u) __attribute__((always_inline)) MOE_EXT_TARGET {
      MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
        Bits first{}, last{};
        // The first unit of a segment is even if codes have 6 bits.
        Values::template load_unit<codes>(panel, high_bits, unit + u, v, first, last);
        Values::template to_bytes<codes>(u % 2 != 0, first, last);
        if constexpr (looks_up) {
          Simd::look_up(table, first);
          Simd::look_up(table, last);
        }
        MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
          const int8_t* eight = numbers + r * a.ld + (unit + u) * kPackedInputs;
          Simd::dot(first, eight, total[0][r][v]);
          Simd::dot(last, eight + 4, total[kChains - 1][r][v]);
        }
      }
    };
    if constexpr (std::is_same_v<decltype(units), int64_t>) {
      for (int u = 0; u < units; ++u) multiply_unit(u);
    } else {
      MOE_EXT_UNROLL for (int u = 0; u < kUnits; ++u) multiply_unit(u);
    }
    MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
      const float scale_of_a = scales_of_a[r * a.num_segments + segment];
      MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
        if constexpr (kChains == 2) total[0][r][v] += total[1][r][v];
        Vector product;
        Values::convert(total[0][r][v], product);
        sum[r][v] += product * (scale[v] * scale_of_a);
        if constexpr (kHasMinima) sum[r][v] -= minimum[v] * totals[r * a.num_segments + segment];
      }
    }
  };
  // The scales are read between the products: the memory would be idle while they were read at
  // once.
  Values::template read_scales_of<scales>(
      layout, panel, 0, layout.num_groups(),
      [&](int64_t group, const Vector* scale, const Vector* minimum) __attribute__((always_inline))
      MOE_EXT_TARGET {
        int64_t segment = group * segments_of_group, unit = segment * units_of_segment;
        const int64_t end = std::min(num_units, unit + segments_of_group * units_of_segment);
        if (units_of_segment == kUnits) {
          for (; unit + kUnits <= end; unit += kUnits, ++segment) {
            multiply_segment(segment, unit, std::integral_constant<int64_t, kUnits>(), scale,
                             minimum);
          }
        }
        for (; unit < end; unit += units_of_segment, ++segment) {
          multiply_segment(segment, unit, std::min(end - unit, units_of_segment), scale, minimum);
        }
      });
  MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
    MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
      float* to = c + r * ldc + v * Values::kLanes;
      if (add) {
        Vector before;
        std::memcpy(&before, to, sizeof(before));
        sum[r][v] = before + sum[r][v];
      }
      std::memcpy(to, &sum[r][v], sizeof(Vector));
    }
  }
}

// An IntegerKernel.
template <typename Simd, Codes codes, Scales scales, bool looks_up>
MOE_EXT_TARGET void integer_kernel(const PackedLayout& layout, const IntegerCodes& integers,
                                   const uint8_t* panels, int64_t num_panels, const IntegerRows& a,
                                   int64_t num_rows, bool add, float* c, int64_t ldc) {
  constexpr bool kWide = Unpacking<Simd>::kVectors == 1;  // has 32 registers
  const int64_t panel_bytes = layout.panel_bytes();
  const uint8_t* end = panels + num_panels * panel_bytes;
  for (int64_t p = 0; p < num_panels; ++p) {
    const uint8_t* panel = panels + p * panel_bytes;
    Ahead ahead(panel, end, panel_bytes, a.num_segments, kIntegerBytesAhead);
    int64_t row = 0;
    const auto multiply = [&](auto rows) __attribute__((always_inline)) MOE_EXT_TARGET {
      for (; row + rows() <= num_rows; row += rows()) {
        multiply_integers<Simd, codes, scales, looks_up, rows()>(
            layout, integers, panel, ahead, a, row, add, c + row * ldc + p * kPanelOutputs, ldc);
        ahead = Ahead();
      }
    };
    if constexpr (kWide) multiply(std::integral_constant<int, 8>());
    multiply(std::integral_constant<int, 4>());
    multiply(std::integral_constant<int, 2>());
    multiply(std::integral_constant<int, 1>());
  }
}

// Returns the kernel of an instruction set for a format with integer values.
template <typename Simd>
IntegerKernel integer_kernel_of(const PackedFormat& format) {
  const bool halves = format.scales == Scales::kFloat16;
  switch (format.codes) {
    case Codes::kSixBits:
      return integer_kernel<Simd, Codes::kSixBits, Scales::kInt8OfBlocks, false>;
    case Codes::kInt8:
      return halves ? integer_kernel<Simd, Codes::kInt8, Scales::kFloat16, false>
                    : integer_kernel<Simd, Codes::kInt8, Scales::kFloat32, false>;
    default:
      break;
  }
  if (!counts_up(format)) return integer_kernel<Simd, Codes::kTable, Scales::kE8M0, true>;
  if (format.scales == Scales::kUint8AndMinOfBlocks) {
    return integer_kernel<Simd, Codes::kTable, Scales::kUint8AndMinOfBlocks, false>;
  }
  return halves ? integer_kernel<Simd, Codes::kTable, Scales::kFloat16, false>
                : integer_kernel<Simd, Codes::kTable, Scales::kFloat32, false>;
}

}  // namespace
}  // namespace moe_ext::cpu
