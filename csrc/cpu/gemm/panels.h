// The panels of packed weights, as the kernels of unpack_kernels.h read them: a few of their inputs
// at a time, whose scales are computed first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "../vectorize.h"
#include "simd.h"
#include "unpacked_values.h"
#include "unpacking.h"

namespace moe_ext::cpu {
namespace {

// The groups of at most kMaxInputs inputs, which may begin and end in the middle of a group.
constexpr int64_t kMaxGroups = kMaxInputs / kPackedInputs + 2;

// Computes the groups that have some of these inputs.
MOE_EXT_KERNEL std::pair<int64_t, int64_t> groups_of(const PackedLayout& layout,
                                                     int64_t first_input, int64_t num_inputs) {
  return {first_input / layout.group, (first_input + num_inputs + layout.group - 1) / layout.group};
}

// A panel while at most kMaxInputs of its inputs are read.
template <typename Simd_, Codes codes_, bool has_minima_>
class Panel {
 public:
  using Simd = Simd_;
  using Base = Panel;  // what reads the scales that a subclass does not
  using Values = Unpacking<Simd>;
  using Vector = typename Values::Vector;
  static constexpr Codes codes = codes_;
  static constexpr bool has_minima = has_minima_;
  static constexpr int kVectors = Values::kVectors, kNumbers = Simd::kPairs ? 2 : 1;

  // The values of codes of 4 bits.
  struct Table {
    explicit Table(const PackedFormat& format) { std::copy_n(format.values, 16, values); }
    float values alignas(64)[16];
  };

  MOE_EXT_MEMBER void start(const PackedLayout& layout, const uint8_t* panel, int64_t first_input,
                            int64_t num_inputs) {
    panel_ = panel;
    high_bits_ = panel + layout.high_bits();
    const auto [first, last] = groups_of(layout, first_input, num_inputs);
    Values::template read_scales<codes, has_minima>(
        layout, panel, first, last,
        [&](int64_t i, const Vector* scales, const Vector* minima) __attribute__((always_inline))
        MOE_EXT_TARGET {
          MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
            Values::store_factor(scales[v], scales_ + i * kPanelOutputs + v * Values::kLanes);
            if constexpr (has_minima) {
              Values::store_factor(minima[v], minima_ + i * kPanelOutputs + v * Values::kLanes);
            }
          }
        });
  }

  // Computes w of the inputs of a unit, for the lanes of vector v; see `values`. `group` counts
  // from that of the first input.
  template <bool reads_on>
  MOE_EXT_MEMBER void weights(const Table& table, int64_t group, int64_t unit, int v,
                              Vector* w) const {
    const int64_t place = group * kPanelOutputs;
    Vector scale, minimum;
    Values::load(scales_ + place, v, scale);
    if constexpr (has_minima) Values::load(minima_ + place, v, minimum);
    Values::template values<codes, reads_on>(table.values, panel_, high_bits_, unit, v, w);
    MOE_EXT_UNROLL for (int i = 0; i < kPackedInputs; ++i) {
      if constexpr (has_minima) {
        Values::scale_and_subtract(scale, minimum, w[i]);
      } else {
        w[i] *= scale;
      }
      if constexpr (kRounds<Simd>) Simd::round(w[i]);
    }
  }

  // Computes the K-groups of a unit.
  MOE_EXT_MEMBER void k_groups(const Table& table, int64_t group, int64_t unit, int v,
                               Vector* to) const {
    if constexpr (Simd::kPairs) {
      Vector w[kPackedInputs];
      weights</*reads_on=*/true>(table, group, unit, v, w);
      MOE_EXT_UNROLL for (int i = 0; i < kPackedInputs; i += 2) {
        Simd::join(w[i], w[i + 1], to[i / 2]);
      }
    } else {
      weights</*reads_on=*/true>(table, group, unit, v, to);
    }
  }

  // Puts the outputs in order, if lanes have them in another one.
  MOE_EXT_TARGET MOE_EXT_KERNEL void order(Vector&) {}

 protected:
  const uint8_t *panel_, *high_bits_;
  float scales_ alignas(64)[kMaxGroups * kPanelOutputs];
  float minima_ alignas(64)[has_minima ? kMaxGroups * kPanelOutputs : kPanelOutputs];
};

// Returns make(std::type_identity<Panel>()) for the Panel of a format.
template <typename Simd, typename Make>
auto for_panel_of(const PackedFormat& format, const Make& make) {
  switch (format.codes) {
    case Codes::kSixBits:
      return make(std::type_identity<Panel<Simd, Codes::kSixBits, false>>());
    case Codes::kInt8:
      return make(std::type_identity<Panel<Simd, Codes::kInt8, false>>());
    case Codes::kE4M3:
      return make(std::type_identity<Panel<Simd, Codes::kE4M3, false>>());
    default:
      return format.scales == Scales::kUint8AndMinOfBlocks
                 ? make(std::type_identity<Panel<Simd, Codes::kTable, true>>())
                 : make(std::type_identity<Panel<Simd, Codes::kTable, false>>());
  }
}

}  // namespace
}  // namespace moe_ext::cpu
