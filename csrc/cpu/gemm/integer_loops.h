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
#include "unpacking_loops.h"

namespace moe_ext::cpu {
namespace {

template <typename Simd, Codes codes, bool looks_up>
struct IntegerUnits {
  using Loops = Unpacking<Simd>;
  using Bits = typename Loops::Bits;

  // Returns the unsigned integers of the inputs 0 to 3 and 4 to 7 of a unit, four in each lane.
  MOE_EXT_TARGET MOE_EXT_KERNEL void load(const PackedLayout& layout, const uint8_t* table,
                                          const uint8_t* panel, int64_t unit, int v, Bits& first,
                                          Bits& last) {
    Bits low{}, high{};
    Loops::template load_unit<codes>(layout, panel, unit, v, low, high);
    if constexpr (codes == Codes::kInt8) {
      first = low ^ 0x80808080;
      last = high ^ 0x80808080;
      return;
    }
    first = low & 0x0f0f0f0f;
    last = low >> 4 & 0x0f0f0f0f;
    if constexpr (codes == Codes::kSixBits) {
      first |= (high & 0x03030303) << 4;
      last |= (high >> 2 & 0x03030303) << 4;
    } else if constexpr (looks_up) {
      Simd::look_up(table, first);
      Simd::look_up(table, last);
    }
  }
};

template <typename Simd, Codes codes, bool looks_up, bool has_minima, int kRows, int kPanels>
MOE_EXT_TARGET MOE_EXT_KERNEL void multiply_integers(const PackedLayout& layout,
                                                     const IntegerCodes& integers,
                                                     const uint8_t* panels, const IntegerRows& a,
                                                     int64_t first_row, bool add, float* c,
                                                     int64_t ldc) {
  using Loops = Unpacking<Simd>;
  using Units = IntegerUnits<Simd, codes, looks_up>;
  using Vector = typename Loops::Vector;
  using Bits = typename Loops::Bits;
  using Integers = typename Loops::Integers;
  constexpr int kVectors = Loops::kVectors;
  constexpr int64_t kBytesAhead = 4096 / kPanels;
  uint8_t table alignas(64)[64];
  for (int i = 0; i < 64; ++i) table[i] = integers.table[i % 16];
  const uint8_t* panel[kPanels];
  MOE_EXT_UNROLL for (int p = 0; p < kPanels; ++p) panel[p] = panels + p * layout.panel_bytes();
  const int64_t num_units = (layout.inputs + kPackedInputs - 1) / kPackedInputs;
  const int64_t units_of_segment = a.segment / kPackedInputs;
  const int8_t* numbers = a.numbers + first_row * a.ld;
  Vector sum[kRows][kPanels][kVectors] = {};
  Vector scales[kPanels][kVectors] = {}, minima[kPanels][kVectors] = {};
  int64_t group = -1;
  for (int64_t segment = 0; segment < a.num_segments; ++segment) {
    const int64_t unit = segment * units_of_segment;
    if (unit * kPackedInputs / layout.group != group) {
      group = unit * kPackedInputs / layout.group;
      MOE_EXT_UNROLL for (int p = 0; p < kPanels; ++p) {
        Loops::read_scales(layout, panel[p], group, scales[p], minima[p]);
      }
    }
    Integers total[kRows][kPanels][kVectors];
    MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
      const int32_t offset = -integers.offset * a.sums[(first_row + r) * a.num_segments + segment];
      MOE_EXT_UNROLL for (int p = 0; p < kPanels; ++p) {
        MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) total[r][p][v] = Integers{} + offset;
      }
    }
    for (int64_t u = unit; u < std::min(num_units, unit + units_of_segment); ++u) {
      MOE_EXT_UNROLL for (int p = 0; p < kPanels; ++p) {
        __builtin_prefetch(panel[p] + u * layout.bytes_of_unit() + kBytesAhead);
        MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
          Bits first, last;
          Units::load(layout, table, panel[p], u, v, first, last);
          MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
            const int8_t* four = numbers + r * a.ld + u * kPackedInputs;
            Simd::dot(first, four, total[r][p][v]);
            Simd::dot(last, four + 4, total[r][p][v]);
          }
        }
      }
    }
    MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
      const int64_t place = (first_row + r) * a.num_segments + segment;
      const float scale = a.scales[place];
      MOE_EXT_UNROLL for (int p = 0; p < kPanels; ++p) {
        MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
          Vector product;
          Loops::convert(total[r][p][v], product);
          sum[r][p][v] += product * (scales[p][v] * scale);
          if constexpr (has_minima) {
            const float total_of_a = scale / integers.factor * static_cast<float>(a.sums[place]);
            sum[r][p][v] -= minima[p][v] * total_of_a;
          }
        }
      }
    }
  }
  MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
    MOE_EXT_UNROLL for (int p = 0; p < kPanels; ++p) {
      MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
        float* to = c + r * ldc + p * kPanelOutputs + v * Loops::kLanes;
        if (add) {
          Vector before;
          std::memcpy(&before, to, sizeof(before));
          sum[r][p][v] = before + sum[r][p][v];
        }
        std::memcpy(to, &sum[r][p][v], sizeof(Vector));
      }
    }
  }
}

// An IntegerKernel.
template <typename Simd, Codes codes, bool looks_up, bool has_minima>
MOE_EXT_TARGET void integer_kernel(const PackedLayout& layout, const IntegerCodes& integers,
                                   const uint8_t* panels, int64_t num_panels, const IntegerRows& a,
                                   int64_t num_rows, bool add, float* c, int64_t ldc) {
  constexpr bool kWide = Unpacking<Simd>::kVectors == 1;  // has 32 registers
  // Panels in parallel hide the latency of the memory. Minima and high bits need registers.
  constexpr int kMaxPanels = !kWide ? 1 : has_minima || codes == Codes::kSixBits ? 4 : 8;
  constexpr int kPairOfPanels = kWide ? 2 : 1;
  const int64_t panel_bytes = layout.panel_bytes();
  for (int64_t panel = 0; panel < num_panels; panel += kMaxPanels) {
    const int64_t left = std::min<int64_t>(kMaxPanels, num_panels - panel);
    const auto multiply = [&](int64_t row, auto rows, auto size) __attribute__((always_inline))
    MOE_EXT_TARGET {
      for (int64_t p = panel; p < panel + left; p += size()) {
        float* to = c + row * ldc + p * kPanelOutputs;
        const uint8_t* from = panels + p * panel_bytes;
        if (p + size() <= panel + left) {
          multiply_integers<Simd, codes, looks_up, has_minima, rows(), size()>(
              layout, integers, from, a, row, add, to, ldc);
          continue;
        }
        for (int64_t one = p; one < panel + left; ++one) {
          multiply_integers<Simd, codes, looks_up, has_minima, rows(), 1>(
              layout, integers, panels + one * panel_bytes, a, row, add,
              c + row * ldc + one * kPanelOutputs, ldc);
        }
      }
    };
    int64_t row = 0;
    if constexpr (kWide) {
      for (; row + 8 <= num_rows; row += 8) {
        multiply(row, std::integral_constant<int, 8>(), std::integral_constant<int, 1>());
      }
    }
    for (; row + 4 <= num_rows; row += 4) {
      multiply(row, std::integral_constant<int, 4>(), std::integral_constant<int, kPairOfPanels>());
    }
    for (; row < num_rows; ++row) {
      multiply(row, std::integral_constant<int, 1>(), std::integral_constant<int, kMaxPanels>());
    }
  }
}

template <typename Simd>
IntegerKernel integer_kernel_of(const PackedFormat& format) {
  switch (format.codes) {
    case Codes::kSixBits:
      return integer_kernel<Simd, Codes::kSixBits, false, false>;
    case Codes::kInt8:
      return integer_kernel<Simd, Codes::kInt8, false, false>;
    default:
      break;
  }
  if (!counts_up(format)) return integer_kernel<Simd, Codes::kTable, true, false>;
  return format.scales == Scales::kUint8AndMinOfBlocks
             ? integer_kernel<Simd, Codes::kTable, false, true>
             : integer_kernel<Simd, Codes::kTable, false, false>;
}

}  // namespace
}  // namespace moe_ext::cpu
