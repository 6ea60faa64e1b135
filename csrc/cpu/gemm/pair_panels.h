// Panels for AVX512-BF16, whose pairs of weights need fewer instructions than those of Panel. The
// source file includes this header after it has defined MOE_EXT_TARGET.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>

#include "../vectorize.h"
#include "panels.h"
#include "simd.h"
#include "unpacked_values.h"

namespace moe_ext::cpu {
namespace {

// Each output has 4 bytes: repeats those at `first` and behind it, which become the lower halves of
// 16 bits.
template <int first>
MOE_EXT_TARGET MOE_EXT_KERNEL void bytes_of_pair(const __m512i& from, __m512i& to) {
  const __m128i order = _mm_setr_epi8(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13);
  const __m128i bytes = _mm_add_epi8(order, _mm_set1_epi8(first));
  to = _mm512_shuffle_epi8(from, _mm512_maskz_broadcast_i32x4(0xffff, bytes));
}

// Codes of 4 bits with values in bfloat16, and scales that are powers of two: an integer is added
// to the exponents of the values.
template <typename Simd>
class PowerPanel : public Panel<Simd, Codes::kTable, /*has_minima=*/false> {
 public:
  using Base = Panel<Simd, Codes::kTable, false>;
  using typename Base::Values;
  using typename Base::Vector;

  struct Table : Base::Table {
    explicit Table(const PackedFormat& format) : Base::Table(format) {
      for (int i = 0; i < 32; ++i) halves[i] = upper_half(format.values[i % 16]);
    }
    uint16_t halves alignas(64)[32];  // twice: an index has 5 bits
  };

  MOE_EXT_MEMBER void start(const PackedLayout& layout, const uint8_t* panel, int64_t first_input,
                            int64_t num_inputs) {
    this->panel_ = panel;
    const auto [first, last] = groups_of(layout, first_input, num_inputs);
    const uint8_t* from = panel + layout.scales() + first * layout.row_of_scales();
    __mmask16 outside = 0;
    for (int64_t i = 0; i < last - first; ++i) {
      typename Values::Integers exponents;
      Values::template widen<uint8_t>(from + i * layout.row_of_scales(), 0, exponents);
      // The values have exponents from -1 to 2, and those of the products must be from -126 to 127.
      const auto above = (__m512i)(exponents - 2);
      outside |= _mm512_cmpgt_epu32_mask(above, _mm512_set1_epi32(250));
      const auto twice = (__m512i)(exponents << 7 | exponents << 23);
      powers_[i] = _mm512_sub_epi16(twice, _mm512_set1_epi16(127 << 7));
    }
    fits_ = outside == 0;
  }

  bool fits() const { return fits_; }

  MOE_EXT_MEMBER void k_groups(const Table& table, int64_t group, int64_t unit, int,
                               Vector* to) const {
    // The lowest 4 of 16 bits are a code.
    const __m512i codes = _mm512_loadu_si512(this->panel_ + unit * 64);
    __m512i first, second;
    bytes_of_pair<0>(codes, first);
    bytes_of_pair<2>(codes, second);
    look_up(table, first, group, to[0]);
    look_up(table, second, group, to[1]);
    look_up(table, _mm512_srli_epi16(first, 4), group, to[2]);
    look_up(table, _mm512_srli_epi16(second, 4), group, to[3]);
  }

 private:
  MOE_EXT_MEMBER void look_up(const Table& table, const __m512i& codes, int64_t group,
                              Vector& to) const {
    const __m512i values = _mm512_permutexvar_epi16(codes, _mm512_load_si512(table.halves));
    // A zero keeps its exponent.
    const __mmask32 others = _mm512_test_epi16_mask(values, _mm512_set1_epi16(0x7fff));
    to = (Vector)_mm512_maskz_add_epi16(others, values, powers_[group]);
  }

  bool fits_;
  __m512i powers_[kMaxGroups];
};

// The lower and the upper bytes of kE4M3.
inline constexpr auto kE4M3Bytes alignas(64) = [] {
  std::array<std::array<uint8_t, 128>, 2> bytes{};
  for (int code = 0; code < 128; ++code) {
    bytes[0][code] = kE4M3[code] & 0xff;
    bytes[1][code] = kE4M3[code] >> 8;
  }
  return bytes;
}();

// E4M3 codes. AVX512-VBMI looks up the bytes of 64 values at once.
template <typename Simd>
class BytePanel : public Panel<Simd, Codes::kE4M3, /*has_minima=*/false> {
 public:
  using Base = Panel<Simd, Codes::kE4M3, false>;
  using typename Base::Table;
  using typename Base::Values;
  using typename Base::Vector;

  MOE_EXT_MEMBER void start(const PackedLayout& layout, const uint8_t* panel, int64_t first_input,
                            int64_t num_inputs) {
    this->panel_ = panel;
    const auto [first, last] = groups_of(layout, first_input, num_inputs);
    Values::template read_scales_of<Scales::kFloat32>(
        layout, panel, first, last,
        [&](int64_t i, const Vector* scales, const Vector*) __attribute__((always_inline))
        MOE_EXT_TARGET {
          const auto all = (__m512)*scales;
          low_[i] = (Vector)_mm512_maskz_unpacklo_ps(0xffff, all, all);
          high_[i] = (Vector)_mm512_maskz_unpackhi_ps(0xffff, all, all);
        });
  }

  MOE_EXT_MEMBER void k_groups(const Table&, int64_t group, int64_t unit, int, Vector* to) const {
    // In the 16 bytes of 4 outputs, first those of the pairs (0, 1), then those of the pairs (2,
    // 3).
    const __m512i order = _mm512_maskz_broadcast_i32x4(
        0xffff, _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    MOE_EXT_UNROLL for (int half = 0; half < 2; ++half) {
      const uint8_t* from = this->panel_ + unit * 128 + half * 64;
      const __m512i codes = _mm512_shuffle_epi8(_mm512_loadu_si512(from), order);
      __m512i lower, upper;
      look_up(kE4M3Bytes[0], codes, lower);
      look_up(kE4M3Bytes[1], codes, upper);
      // The sign is the highest bit of both.
      upper = _mm512_ternarylogic_epi32(upper, codes, _mm512_set1_epi8(-128), 0xf8);
      scale_pairs(_mm512_maskz_unpacklo_epi8(~0ull, lower, upper), group, to[2 * half]);
      scale_pairs(_mm512_maskz_unpackhi_epi8(~0ull, lower, upper), group, to[2 * half + 1]);
    }
  }

  // Lanes have the outputs 0, 1, 4, 5, … and then the others.
  MOE_EXT_TARGET MOE_EXT_KERNEL void order(Vector& sum) {
    const __m512i places = _mm512_setr_epi32(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    sum = (Vector)_mm512_maskz_permutexvar_ps(0xffff, places, (__m512)sum);
  }

 private:
  MOE_EXT_TARGET MOE_EXT_KERNEL void look_up(const std::array<uint8_t, 128>& bytes,
                                             const __m512i& codes, __m512i& to) {
    to = _mm512_permutex2var_epi8(_mm512_load_si512(bytes.data()), codes,
                                  _mm512_load_si512(bytes.data() + 64));
  }

  MOE_EXT_MEMBER void scale_pairs(const __m512i& pairs, int64_t group, Vector& to) const {
    const __m512i zero = _mm512_setzero_si512();
    const auto low = (Vector)_mm512_maskz_unpacklo_epi16(~0u, zero, pairs) * low_[group];
    const auto high = (Vector)_mm512_maskz_unpackhi_epi16(~0u, zero, pairs) * high_[group];
    to = (Vector)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  }

  // The scales of the outputs 0, 1, 4, 5, … and of the others, each of them twice.
  Vector low_[kMaxGroups], high_[kMaxGroups];
};

}  // namespace
}  // namespace moe_ext::cpu
