// The kernels of packed weights (unpacking.h): those that unpack them, and those for few rows. The
// source file of each instruction set includes this header after it has defined MOE_EXT_TARGET.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../vectorize.h"
#include "panels.h"
#include "prefetch_ahead.h"
#include "simd.h"
#include "unpacking.h"

namespace moe_ext::cpu {
namespace {

template <typename Simd>
constexpr int kChainsOf = 1;
template <typename Simd>
requires requires { Simd::kChains; }
constexpr int kChainsOf<Simd> = Simd::kChains;

// Calls body(group, unit, num_inputs) for the units from first_input, a multiple of 8. Only the
// last one may have fewer than 8 inputs. Groups are counted from that of the first input.
template <typename Body>
MOE_EXT_TARGET MOE_EXT_KERNEL void for_units(const PackedLayout& layout, int64_t first_input,
                                             int64_t num_inputs, const Body& body) {
  const int64_t end = first_input + num_inputs;
  int64_t input = first_input, next_group = input / layout.group * layout.group;
  for (int64_t group = 0; input < end; ++group) {
    next_group += layout.group;
    const int64_t end_of_group = std::min(end, next_group);
    for (; input + kPackedInputs <= end_of_group; input += kPackedInputs) {
      body(group, input / kPackedInputs, std::integral_constant<int64_t, kPackedInputs>());
    }
    if (input < end_of_group) {
      body(group, input / kPackedInputs, end_of_group - input);
      return;
    }
  }
}

// Prefetches the codes of a unit.
template <Codes codes>
MOE_EXT_TARGET MOE_EXT_KERNEL void prefetch_unit(const PackedLayout& layout, const uint8_t* panel,
                                                 int64_t unit) {
  constexpr bool kHighBits = codes == Codes::kSixBits;
  constexpr int64_t kBytes = kHighBits ? 64 : kBytesOfUnit<codes>;
  MOE_EXT_UNROLL for (int64_t byte = 0; byte < kBytes; byte += 64) {
    __builtin_prefetch(panel + unit * kBytes + byte, 0, 2);
  }
  if (kHighBits && unit % 2 == 0) {
    __builtin_prefetch(panel + layout.high_bits() + unit / 2 * 64, 0, 2);
  }
}

// Prefetches the scales of inputs.
MOE_EXT_TARGET inline void prefetch_scales(const PackedLayout& layout, const PanelInputs& inputs) {
  const auto lines = [](const uint8_t* from, int64_t bytes) {
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(from + byte, 0, 2);
  };
  const int64_t group = inputs.first / layout.group;
  const int64_t num_groups = inputs.size / layout.group + 1, row = layout.row_of_scales();
  lines(inputs.panel + layout.scales() + group * row, num_groups * row);
  if (layout.has_minima()) lines(inputs.panel + layout.minima() + group * row, num_groups * row);
}

// An UnpackKernel.
template <typename Panel, Unpacked unpacked>
MOE_EXT_TARGET void unpack_kernel(const PackedLayout& layout, const PanelInputs& inputs,
                                  const PanelInputs& next, void* to, int64_t ld) {
  using Simd = typename Panel::Simd;
  using Values = typename Panel::Values;
  constexpr int kStep = unpacked == Unpacked::kPairs ? 2 : 1;
  constexpr int64_t kSize = unpacked == Unpacked::kRounded ? 2 : 4;  // of a number in bytes
  const typename Panel::Table table(*layout.format);
  Panel source;
  source.start(layout, inputs.panel, inputs.first, inputs.size);
  prefetch_scales(layout, next);
  const int64_t units_ahead = (next.first - inputs.first) / kPackedInputs;
  auto* row = static_cast<uint8_t*>(to);
  for_units(
      layout, inputs.first, inputs.size,
      [&](int64_t group, int64_t unit, int64_t) __attribute__((always_inline)) MOE_EXT_TARGET {
        prefetch_unit<Panel::codes>(layout, next.panel, unit + units_ahead);
        MOE_EXT_UNROLL for (int v = 0; v < Values::kVectors; ++v) {
          typename Values::Vector w[kPackedInputs];
          // What is behind may not be in the cache yet.
          source.template weights</*reads_on=*/false>(table, group, unit, v, w);
          MOE_EXT_UNROLL for (int i = 0; i < kPackedInputs; i += kStep) {
            void* place = row + (i / kStep * ld + v * Values::kLanes) * kSize;
            if constexpr (unpacked == Unpacked::kRounded) {
              Simd::store_rounded(w[i], place);
            } else {
              if constexpr (unpacked == Unpacked::kPairs) Simd::join(w[i], w[i + 1], w[i]);
              std::memcpy(place, &w[i], sizeof(w[i]));
            }
          }
        }
        row += kPackedInputs / kStep * ld * kSize;
      });
}

// Writes sums to C, or adds them with `add`.
template <typename Panel, int kRows, int kPanels, int kVectors>
MOE_EXT_TARGET MOE_EXT_KERNEL void store_panels(
    typename Panel::Vector (&sum)[kRows][kPanels][kVectors], int64_t num_rows, bool add, float* c,
    int64_t ldc) {
  using Values = typename Panel::Values;
  using Vector = typename Panel::Vector;
  MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
    if (r >= num_rows) break;
    MOE_EXT_UNROLL for (int p = 0; p < kPanels; ++p) {
      MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
        float* to = c + r * ldc + p * kPanelOutputs + v * Values::kLanes;
        Panel::order(sum[r][p][v]);
        Vector before;
        if (add) {
          std::memcpy(&before, to, sizeof(before));
          sum[r][p][v] = before + sum[r][p][v];
        }
        std::memcpy(to, &sum[r][p][v], sizeof(before));
      }
    }
  }
}

// The columns of C for kPanels panels.
template <typename Panel, int kRows, int kPanels>
MOE_EXT_TARGET MOE_EXT_KERNEL void multiply_panels(const PackedLayout& layout,
                                                   const uint8_t* panels, const uint8_t* end,
                                                   const uint8_t* next, int64_t kc, const float* a,
                                                   int64_t lda, int64_t num_rows, bool add,
                                                   float* c, int64_t ldc) {
  using Simd = typename Panel::Simd;
  using Values = typename Panel::Values;
  using Vector = typename Values::Vector;
  constexpr int kVectors = Values::kVectors, kNumbers = Panel::kNumbers;
  constexpr int kGroups = kPackedInputs / kNumbers;
  constexpr int kChains = kChainsOf<Simd>, kUnitsOfChain = 32 / kPackedInputs;
  constexpr int64_t kBytesAhead = 8 << 10;
  // The panels whose numbers are computed before their products. Floats with minima would need
  // more registers for several panels than there are.
  constexpr int kTogether = Panel::has_minima && !Simd::kPairs && kRows <= 2 ? 1 : kPanels;
  // What is prefetched with a unit of each panel: codes, and at most one line of scales.
  constexpr int kLines = (kPanels * kBytesOfUnit<Panel::codes> + 63) / 64 + 1;
  const typename Panel::Table table(*layout.format);
  const int64_t panel_bytes = layout.panel_bytes();
  Panel source[kPanels];
  const float* row[kRows];
  MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
    row[r] = a + std::min<int64_t>(r, num_rows - 1) * lda;
  }
  Ahead ahead(panels, end, kPanels * panel_bytes,
              (layout.inputs + kPackedInputs - 1) / kPackedInputs, kBytesAhead, next);
  for (int64_t first_input = 0; first_input < layout.inputs; first_input += kc, add = true) {
    const int64_t num_inputs = std::min(kc, layout.inputs - first_input);
    MOE_EXT_UNROLL for (int p = 0; p < kPanels; ++p) {
      source[p].start(layout, panels + p * panel_bytes, first_input, num_inputs);
    }
    Vector sum[kRows][kPanels][kVectors] = {};
    [[maybe_unused]] Vector chains[kChains][kRows][kPanels][kVectors] = {};
    [[maybe_unused]] const auto add_chains = [&]() __attribute__((always_inline)) MOE_EXT_TARGET {
      MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
        MOE_EXT_UNROLL for (int p = 0; p < kPanels; ++p) {
          MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
            Vector &even = chains[0][r][p][v], &odd = chains[kChains - 1][r][p][v];
            sum[r][p][v] = sum[r][p][v] + (even + odd);
            even = odd = Vector{};
          }
        }
      }
    };
    const auto multiply = [&](auto fit) __attribute__((always_inline)) MOE_EXT_TARGET {
      for_units(
          layout, first_input, num_inputs,
          [&](int64_t group, int64_t unit, auto size) __attribute__((always_inline))
          MOE_EXT_TARGET {
            ahead.prefetch_lines<kLines>();
            MOE_EXT_UNROLL for (int first = 0; first < kPanels; first += kTogether) {
              Vector w[kTogether][kVectors][kGroups];
              MOE_EXT_UNROLL for (int p = 0; p < kTogether; ++p) {
                MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
                  if constexpr (fit()) {
                    source[first + p].k_groups(table, group, unit, v, w[p][v]);
                  } else {
                    static_cast<const typename Panel::Base&>(source[first + p])
                        .k_groups(table, group, unit, v, w[p][v]);
                  }
                }
              }
              MOE_EXT_UNROLL for (int i = 0; i < kGroups; ++i) {
                if (i * kNumbers >= size) break;
                MOE_EXT_UNROLL for (int p = 0; p < kTogether; ++p) {
                  MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
                    MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
                      const float& number = row[r][unit * kGroups + i];
                      auto& sums = kChains > 1 ? chains[i % kChains] : sum;
                      Vector total = sums[r][first + p][v];
                      multiply_add_once<Simd>(number, w[p][v][i], total);
                      sums[r][first + p][v] = total;
                    }
                  }
                }
              }
            }
            if constexpr (kChains > 1) {
              if (unit % kUnitsOfChain == kUnitsOfChain - 1) add_chains();
            }
          });
      if constexpr (kChains > 1) add_chains();
    };
    if constexpr (requires { source[0].fits(); }) {
      // If the scales of a panel do not fit, all panels are read as their base.
      bool fits = true;
      for (const Panel& panel : source) fits &= panel.fits();
      if (fits) {
        multiply(std::true_type());
      } else {
        MOE_EXT_UNROLL for (int p = 0; p < kPanels; ++p) {
          static_cast<typename Panel::Base&>(source[p]).start(layout, panels + p * panel_bytes,
                                                              first_input, num_inputs);
        }
        multiply(std::false_type());
      }
    } else {
      multiply(std::true_type());
    }
    store_panels<Panel>(sum, num_rows, add, c, ldc);
  }
}

// A FewRowsKernel.
template <typename Panel, int kRows>
MOE_EXT_TARGET void few_rows_kernel(const PackedLayout& layout, const uint8_t* panels,
                                    int64_t num_panels, const uint8_t* next, int64_t kc,
                                    const float* a, int64_t lda, int64_t num_rows, bool add,
                                    float* c, int64_t ldc) {
  // Several chains at a time hide the latency of the multiply-adds. With 4 rows, those of two
  // panels do, and registers are left for the numbers.
  constexpr int kVectors = Panel::kVectors;
  constexpr int kPanels = std::clamp(16 / (kRows * kVectors * kVectors), 1, kRows < 4 ? 4 : 2);
  const int64_t panel_bytes = layout.panel_bytes();
  const uint8_t* end = panels + num_panels * panel_bytes;
  int64_t panel = 0;
  const auto multiply = [&](auto size) __attribute__((always_inline)) MOE_EXT_TARGET {
    multiply_panels<Panel, kRows, size()>(layout, panels + panel * panel_bytes, end, next, kc, a,
                                          lda, num_rows, add, c + panel * kPanelOutputs, ldc);
    panel += size();
  };
  while (panel + kPanels <= num_panels) multiply(std::integral_constant<int, kPanels>());
  while (panel < num_panels) multiply(std::integral_constant<int, 1>());
}

template <typename Panel>
constexpr FewRowsKernels few_rows_kernels_of() {
  using Simd = typename Panel::Simd;
  // AVX2 has too few registers for 8 rows.
  constexpr auto kEight = Simd::kBytes == 64 ? few_rows_kernel<Panel, 8> : nullptr;
  return {.pairs = Simd::kPairs,
          .rounds_a = kChainsOf<Simd> > 1,
          .kernels = {few_rows_kernel<Panel, 1>, few_rows_kernel<Panel, 2>,
                      few_rows_kernel<Panel, 4>, kEight}};
}

// The kernels of an instruction set for a format. FewRows is the Panel of those for few rows.
template <typename Panel, typename FewRows = Panel>
constexpr CodeKernels code_kernels_of() {
  using Simd = typename Panel::Simd;
  CodeKernels kernels{.unpack = unpack_kernel<Panel, Unpacked::kFloats>,
                      .few_rows = few_rows_kernels_of<FewRows>()};
  if constexpr (Simd::kPairs) {
    kernels.unpack_rounded = unpack_kernel<Panel, Unpacked::kRounded>;
    kernels.unpack_pairs = unpack_kernel<Panel, Unpacked::kPairs>;
  }
  return kernels;
}

// Returns the kernels of an instruction set for a format.
template <typename Simd>
const CodeKernels& code_kernels_of(const PackedFormat& format) {
  return *for_panel_of<Simd>(format, []<typename Panel>(std::type_identity<Panel>) {
    static constexpr CodeKernels kKernels = code_kernels_of<Panel>();
    return &kKernels;
  });
}

}  // namespace
}  // namespace moe_ext::cpu
