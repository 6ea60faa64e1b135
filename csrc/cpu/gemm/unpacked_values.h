// The numbers of packed weights, from their codes and scales. The source file includes this header
// after it has defined MOE_EXT_TARGET.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../../kernels/types.h"
#include "../vectorize.h"
#include "simd.h"
#include "unpacking.h"

namespace moe_ext::cpu {
namespace {

// The upper halves of floats whose lower halves are 0.
constexpr uint16_t upper_half(float value) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
}

// The values of the E4M3 codes without a sign: the exponent has the bias 7.
inline constexpr auto kE4M3 alignas(64) = [] {
  std::array<uint16_t, 128> halves{};
  for (int code = 0; code < 127; ++code) {
    float value = static_cast<float>(code < 8 ? code : 8 + code % 8) * 0x1p-9f;
    for (int exponent = code / 8; exponent > 1; --exponent) value *= 2;
    halves[code] = upper_half(value);
  }
  halves[127] = 0x7fc0;
  return halves;
}();

// The values of the codes of 6 bits.
inline constexpr auto kSixBitValues alignas(64) = [] {
  std::array<uint16_t, 64> halves{};
  for (int code = 0; code < 64; ++code) halves[code] = upper_half(static_cast<float>(code - 32));
  return halves;
}();

// The bytes of the codes of 8 inputs.
template <Codes codes>
constexpr int kBytesOfUnit = codes == Codes::kTable     ? 64
                             : codes == Codes::kSixBits ? 96
                                                        : 128;

template <typename Simd>
constexpr bool kRounds = requires(typename Simd::Aligned w) {
  Simd::round(w);
};

template <typename Simd, int kBytes = Simd::kBytes>
struct Unpacking {
  static constexpr int kLanes = kBytes / 4, kVectors = 16 / kLanes;
  typedef float Vector __attribute__((vector_size(kBytes)));
  typedef uint32_t Bits __attribute__((vector_size(kBytes)));
  typedef int32_t Integers __attribute__((vector_size(kBytes)));

  template <typename to_t>
  MOE_EXT_TARGET MOE_EXT_KERNEL void load(const void* from, int v, to_t& to) {
    std::memcpy(&to, static_cast<const uint8_t*>(from) + v * sizeof(to_t), sizeof(to_t));
  }

  template <typename From, typename To>
  MOE_EXT_TARGET MOE_EXT_KERNEL void convert(const From& from, To& to) {
    to = __builtin_convertvector(from, To);
  }

  MOE_EXT_TARGET MOE_EXT_KERNEL void convert_halves(const uint8_t* from, Vector* to) {
    MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
#if defined(__x86_64__)
      const void* place = from + v * kLanes * 2;
      if constexpr (kBytes == 64) {
        // gcc 12 warns of the intrinsic without a mask.
        const __m256i halves = _mm256_loadu_si256(static_cast<const __m256i*>(place));
        to[v] = (Vector)_mm512_maskz_cvtph_ps(0xffff, halves);
        continue;
      } else if constexpr (kBytes == 32) {
        to[v] = (Vector)_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(place)));
        continue;
      }
#endif
      {
        c10::Half halves[kLanes];
        float floats alignas(kBytes)[kLanes];
        std::memcpy(halves, from + v * kLanes * 2, sizeof(halves));
        for (int l = 0; l < kLanes; ++l) floats[l] = halves[l];
        load(floats, 0, to[v]);
      }
    }
  }

  // Widens uint8_t or int8_t. gcc 12 has no instruction for this conversion of vectors.
  template <typename byte_t>
  MOE_EXT_TARGET MOE_EXT_KERNEL void widen(const uint8_t* from, int v, Integers& to) {
    [[maybe_unused]] constexpr bool kSigned = std::is_same_v<byte_t, int8_t>;
    from += v * kLanes;
#if defined(__x86_64__)
    if constexpr (kBytes == 64) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      to = (Integers)(kSigned ? _mm512_maskz_cvtepi8_epi32(0xffff, bytes)
                              : _mm512_maskz_cvtepu8_epi32(0xffff, bytes));
      return;
    } else if constexpr (kBytes == 32) {
      const __m128i bytes = _mm_loadu_si64(from);
      to = (Integers)(kSigned ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
      return;
    }
#endif
    int32_t integers alignas(kBytes)[kLanes];
    for (int l = 0; l < kLanes; ++l) integers[l] = static_cast<byte_t>(from[l]);
    load(integers, 0, to);
  }

  // Integers of a group times the factors of its block.
  template <typename byte_t>
  MOE_EXT_TARGET MOE_EXT_KERNEL void convert_product(const uint8_t* integers, const Vector* factors,
                                                     Vector* to) {
    MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
      Integers wide;
      Vector floats;
      widen<byte_t>(integers, v, wide);
      convert(wide, floats);
      to[v] = factors[v] * floats;
    }
  }

  // Computes the scales of the groups of a panel from `first` to `last`, and the minima if there
  // are any: write(i, scales, minima) gets those of group first + i.
  template <Scales kind, typename Write>
  MOE_EXT_TARGET MOE_EXT_KERNEL void read_scales_of(const PackedLayout& layout,
                                                    const uint8_t* panel, int64_t first,
                                                    int64_t last, const Write& write) {
    const uint8_t* from = panel + layout.scales() + first * layout.row_of_scales();
    const int64_t num_groups = last - first;
    Vector scales[kVectors], minima[kVectors] = {};
    if constexpr (constexpr int64_t kGroups = PackedLayout::groups_of_block(kind); kGroups > 0) {
      constexpr bool kHasMinima = kind == Scales::kUint8AndMinOfBlocks;
      using byte_t = std::conditional_t<kHasMinima, uint8_t, int8_t>;
      const int64_t first_block = first / kGroups;
      const uint8_t* from_minima = panel + layout.minima() + first * 16;
      const uint8_t* factor = panel + layout.factors() + first_block * 32;
      const uint8_t* factor_of_minima = panel + layout.factors_of_minima() + first_block * 32;
      int64_t end = first_block * kGroups - first;
      for (int64_t i = 0; i < num_groups; factor += 32, factor_of_minima += 32) {
        Vector factors[kVectors], factors_of_minima[kVectors];
        convert_halves(factor, factors);
        if constexpr (kHasMinima) convert_halves(factor_of_minima, factors_of_minima);
        end = std::min(num_groups, end + kGroups);
        for (; i < end; ++i) {
          convert_product<byte_t>(from + i * 16, factors, scales);
          if constexpr (kHasMinima) {
            convert_product<byte_t>(from_minima + i * 16, factors_of_minima, minima);
          }
          write(i, scales, minima);
        }
      }
      return;
    }
    for (int64_t i = 0; i < num_groups; ++i) {
      if constexpr (kind == Scales::kFloat16) {
        convert_halves(from + i * 32, scales);
      } else {
        MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
          if constexpr (kind == Scales::kFloat32) {
            load(from + i * 64, v, scales[v]);
          } else {
            Integers exponents;
            widen<uint8_t>(from + i * 16, v, exponents);
            const Bits bits = (Bits)exponents << 23;
            scales[v] = (Vector)(bits | ((Bits)(bits == 0) & 0x400000));
          }
        }
      }
      write(i, scales, minima);
    }
  }

  // As read_scales_of, for the kind of scales of the layout's format.
  template <Codes codes, bool has_minima, typename Write>
  MOE_EXT_TARGET MOE_EXT_KERNEL void read_scales(const PackedLayout& layout, const uint8_t* panel,
                                                 int64_t first, int64_t last, const Write& write) {
    if constexpr (has_minima) {
      read_scales_of<Scales::kUint8AndMinOfBlocks>(layout, panel, first, last, write);
    } else if constexpr (codes == Codes::kSixBits) {
      read_scales_of<Scales::kInt8OfBlocks>(layout, panel, first, last, write);
    } else if (codes == Codes::kE4M3 || layout.format->scales == Scales::kFloat32) {
      read_scales_of<Scales::kFloat32>(layout, panel, first, last, write);
    } else if (layout.format->scales == Scales::kFloat16) {
      read_scales_of<Scales::kFloat16>(layout, panel, first, last, write);
    } else {
      read_scales_of<Scales::kE8M0>(layout, panel, first, last, write);
    }
  }

  // Stores scales or minima. Rounding would change other NaN values than this one.
  MOE_EXT_TARGET MOE_EXT_KERNEL void store_factor(const Vector& factor, float* to) {
    Bits bits = (Bits)factor;
    if constexpr (kRounds<Simd>) bits = factor == factor ? bits : Bits{} + 0x7fc00000;
    std::memcpy(to, &bits, sizeof(bits));
  }

  // The value of a table for each index, of which only the low 4 bits count.
  template <typename Index, typename To>
  MOE_EXT_TARGET MOE_EXT_KERNEL void look_up(const float* table, const Index& index, To& to) {
#if defined(__x86_64__)
    if constexpr (kBytes == 64) {
      to = (To)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)index, _mm512_load_ps(table));
      return;
    } else if constexpr (kBytes == 32) {
      const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), (__m256i)index);
      const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), (__m256i)index);
      to = (To)_mm256_blendv_ps(low, high, (__m256)(index << 28));  // the sign bit selects
      return;
    }
#endif
    float values alignas(kBytes)[kLanes];
    for (int l = 0; l < kLanes; ++l) values[l] = table[index[l] & 15];
    load(values, 0, to);
  }

  // The values of E4M3 codes in the lowest byte.
  MOE_EXT_TARGET MOE_EXT_KERNEL void from_e4m3(const Bits& codes, Vector& to) {
    const Bits magnitude = codes & 0x7f;
    // The exponent has the bias 7. Codes below 8 are multiples of 2^-9.
    Bits bits = (magnitude << 20) + (uint32_t{127 - 7} << 23);
    Vector small;
    convert((Integers)magnitude, small);
    small *= 0x1p-9f;
    const Bits is_small = (Bits)(magnitude < 8), is_nan = (Bits)(magnitude == 0x7f);
    bits = (is_small & (Bits)small) | (~is_small & bits);
    bits |= (is_nan & 0x7fc00000) | (codes << 24 & 0x80000000);
    to = (Vector)bits;
  }

  // The values of four codes in each lane, of 8 bits in E4M3 or of 6 bits.
  template <Codes codes>
  MOE_EXT_TARGET MOE_EXT_KERNEL void look_up_bytes(const Bits& bytes, Vector* to) {
#if defined(__x86_64__)
    if constexpr (kBytes == 64) {
      Bits even, odd;
      look_up_halves<codes>(bytes, even);
      look_up_halves<codes>(bytes >> 8, odd);
      to[0] = (Vector)(even << 16);
      to[1] = (Vector)(odd << 16);
      to[2] = (Vector)(even & 0xffff0000);
      to[3] = (Vector)(odd & 0xffff0000);
      return;
    }
#endif
    if constexpr (codes == Codes::kSixBits) return from_six_bits(bytes, to);
    for (int i = 0; i < 4; ++i) from_e4m3(bytes >> 8 * i, to[i]);
  }

#if defined(__x86_64__)
  // The upper halves of the values of codes in the lower bytes of 16 bits.
  template <Codes codes>
  MOE_EXT_TARGET MOE_EXT_KERNEL void look_up_halves(const Bits& bytes, Bits& to) {
    if constexpr (codes == Codes::kSixBits) return look_up_64(kSixBitValues.data(), bytes, to);
    Bits small, large;
    look_up_64(kE4M3.data(), bytes, small);
    look_up_64(kE4M3.data() + 64, bytes, large);
    const __mmask32 is_large = _mm512_test_epi16_mask((__m512i)bytes, _mm512_set1_epi16(0x40));
    to = (Bits)_mm512_mask_blend_epi16(is_large, (__m512i)small, (__m512i)large);
    to |= bytes << 8 & 0x80008000;
  }

  // The halves of a table of 64; the higher bits of an index do not count.
  MOE_EXT_TARGET MOE_EXT_KERNEL void look_up_64(const uint16_t* table, const Bits& index,
                                                Bits& to) {
    to = (Bits)_mm512_permutex2var_epi16(_mm512_load_si512(table), (__m512i)index,
                                         _mm512_load_si512(table + 32));
  }
#endif

  // w = w scale - minimum. The product is exact, because its factors have 4, 11 and 8 bits: a fused
  // operation has the result of two.
  MOE_EXT_TARGET MOE_EXT_KERNEL void scale_and_subtract(const Vector& scale, const Vector& minimum,
                                                        Vector& w) {
#if defined(__x86_64__)
    if constexpr (kBytes == 64) {
      w = (Vector)_mm512_fmsub_ps((__m512)w, (__m512)scale, (__m512)minimum);
      return;
    } else if constexpr (kBytes == 32) {
      w = (Vector)_mm256_fmsub_ps((__m256)w, (__m256)scale, (__m256)minimum);
      return;
    }
#endif
    w = w * scale - minimum;
  }

  // Integers below 2^23 and these bits are the floats 2^23 + integer.
  static constexpr uint32_t kBitsOfInteger = 0x4b000000;
  static constexpr float kFirstInteger = 1 << 23;

  // The number of the lowest byte, with a sign.
  MOE_EXT_TARGET MOE_EXT_KERNEL void from_int8(const Bits& codes, Vector& to) {
    // With its sign bit reversed, the byte is the number plus 128.
    to = (Vector)((codes & 0xff) ^ (kBitsOfInteger | 0x80)) - (kFirstInteger + 128);
  }

  // The values of four codes of 6 bits.
  MOE_EXT_TARGET MOE_EXT_KERNEL void from_six_bits(const Bits& codes, Vector* to) {
    for (int i = 0; i < 4; ++i) {
      to[i] = (Vector)((codes >> 8 * i & 0xff) | kBitsOfInteger) - (kFirstInteger + 32);
    }
  }

  // Loads the words of a unit: for 8-bit codes those of four inputs each, else the low 4 bits, and
  // the high 2 bits of this unit and its neighbour.
  template <Codes codes>
  MOE_EXT_TARGET MOE_EXT_KERNEL void load_unit(const uint8_t* panel, const uint8_t* high_bits,
                                               int64_t unit, int v, Bits& low, Bits& high) {
    if constexpr (codes == Codes::kTable || codes == Codes::kSixBits) {
      load(panel + unit * 64, v, low);
      if constexpr (codes == Codes::kSixBits) {
        load(high_bits + unit / 2 * 64, v, high);
      }
    } else {
      load(panel + unit * 128, v, low);
      load(panel + unit * 128 + 64, v, high);
    }
  }

  // Replaces the words of a unit by unsigned bytes: of the inputs 0 to 3, and 4 to 7. Those of
  // int8 are larger by 128.
  template <Codes codes>
  MOE_EXT_TARGET MOE_EXT_KERNEL void to_bytes(bool is_odd, Bits& low, Bits& high) {
    if constexpr (codes == Codes::kInt8) {
      low ^= 0x80808080;
      high ^= 0x80808080;
      return;
    }
    const Bits first = low & 0x0f0f0f0f, last = low >> 4 & 0x0f0f0f0f;
    if constexpr (codes == Codes::kSixBits) {
      low = first | ((is_odd ? high : high << 4) & 0x30303030);
      high = last | ((is_odd ? high >> 2 : high << 2) & 0x30303030);
    } else {
      low = first;
      high = last;
    }
  }

  // Loads codes without their first `bytes`: by a shift, or if it `reads_on` by a load that starts
  // and ends later.
  template <bool reads_on>
  MOE_EXT_TARGET MOE_EXT_KERNEL void load_from_byte(const uint8_t* codes, int bytes, int v,
                                                    Bits& to) {
    load(codes + (reads_on ? bytes : 0), v, to);
    if constexpr (!reads_on) to >>= 8 * bytes;
  }

  // Computes the values of the inputs of a unit. If it `reads_on`, it needs fewer instructions, but
  // also the first bytes behind the unit. The scales follow the codes, so that it stays within the
  // panel.
  template <Codes codes, bool reads_on>
  MOE_EXT_TARGET MOE_EXT_KERNEL void values(const float* table, const uint8_t* panel,
                                            const uint8_t* high_bits, int64_t unit, int v,
                                            Vector* to) {
    Bits low{}, high{};
    if constexpr (codes == Codes::kTable || codes == Codes::kInt8) {
      panel += unit * kBytesOfUnit<codes>;
      for (int i = 0; i < 4; ++i) {
        load_from_byte<reads_on>(panel, i, v, low);
        if constexpr (codes == Codes::kTable) {
          look_up(table, low, to[i]);
          look_up(table, low >> 4, to[4 + i]);
        } else {
          load_from_byte<reads_on>(panel + 64, i, v, high);
          from_int8(low, to[i]);
          from_int8(high, to[4 + i]);
        }
      }
      return;
    }
    load_unit<codes>(panel, high_bits, unit, v, low, high);
    if constexpr (codes == Codes::kSixBits) {
      high >>= static_cast<uint32_t>(unit % 2 * 4);
      to_bytes<codes>(/*is_odd=*/false, low, high);
    }
    look_up_bytes<codes>(low, to);
    look_up_bytes<codes>(high, to + 4);
  }
};

}  // namespace
}  // namespace moe_ext::cpu
