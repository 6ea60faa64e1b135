// The loops that unpack weights. The source file of each instruction set includes this header after
// it has defined MOE_EXT_TARGET, as for micro_kernel_loops.h.
//
// `Simd` describes the instruction set, as there. It may also have:
//   round: rounds weights that are floats
//   kChains: the chains of multiply-adds of 32 inputs, whose sum is added to the other sums
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
#include <utility>

#include "../../kernels/types.h"
#include "../vectorize.h"
#include "unpacking.h"

#ifndef MOE_EXT_TARGET
#error "MOE_EXT_TARGET must be defined before unpacking_loops.h"
#endif

namespace moe_ext::cpu {
namespace {

// Prefetches what follows a panel while the panel is read. The addresses ascend by lines, whatever
// the order in which a panel is read: memory delivers that faster. The first line of a page is
// prefetched much earlier, because it takes long to translate the address of a new page.
class Ahead {
 public:
  // Prefetches nothing.
  Ahead() : next_(nullptr), due_(nullptr), end_(nullptr), step_(0) {}

  // What is prefetched is some bytes behind the panel that is read, up to `end`, that of all
  // panels, and after it `later` if that is not null; prefetch() is called num_steps times.
  Ahead(const uint8_t* panel, const uint8_t* end, int64_t panel_bytes, int64_t num_steps,
        int64_t bytes_ahead, const uint8_t* later = nullptr)
      : next_(panel + panel_bytes + bytes_ahead),
        due_(next_),
        end_(end),
        step_((panel_bytes + num_steps - 1) / num_steps) {
    if (next_ < end_) return;
    next_ = due_ = later == nullptr ? end_ : later;
    end_ = next_ + (later == nullptr ? 0 : panel_bytes);
  }

  // Prefetches a step, each line once: for loops that wait for the memory, where a second prefetch
  // of a line would take as long as the first.
  MOE_EXT_TARGET __attribute__((always_inline)) inline void prefetch() {
    const uint8_t* before = next_;
    due_ = std::min(due_ + step_, end_);
    for (; next_ < due_; next_ += 64) __builtin_prefetch(next_);
    prefetch_page(before);
  }

  // Prefetches a step of at most 64 (kLines - 1) bytes, for loops that do not: without a branch,
  // but a line of two steps twice.
  template <int kLines>
  MOE_EXT_TARGET __attribute__((always_inline)) inline void prefetch_lines() {
    const uint8_t* before = next_;
    MOE_EXT_UNROLL for (int line = 0; line < kLines; ++line) {
      __builtin_prefetch(next_ + 64 * line);
    }
    next_ = std::min(next_ + step_, end_);
    prefetch_page(before);
  }

 private:
  static constexpr int64_t kPagesAhead = 32 << 10;

  static uintptr_t page(const uint8_t* byte) { return reinterpret_cast<uintptr_t>(byte) / 4096; }

  MOE_EXT_TARGET __attribute__((always_inline)) inline void prefetch_page(const uint8_t* before) {
    if (page(next_) != page(before)) {
      __builtin_prefetch(next_ + kPagesAhead, /*rw=*/0, /*locality=*/2);
    }
  }

  const uint8_t *next_, *due_, *end_;
  int64_t step_;
};

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

template <typename Simd>
constexpr int kChainsOf = 1;
template <typename Simd>
requires requires { Simd::kChains; }
constexpr int kChainsOf<Simd> = Simd::kChains;

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
  using Loops = Unpacking<Simd>;
  using Vector = typename Loops::Vector;
  static constexpr Codes codes = codes_;
  static constexpr bool has_minima = has_minima_;
  static constexpr int kVectors = Loops::kVectors, kNumbers = Simd::kPairs ? 2 : 1;

  // The values of codes of 4 bits.
  struct Table {
    explicit Table(const PackedFormat& format) { std::copy_n(format.values, 16, values); }
    float values alignas(64)[16];
  };

  MOE_EXT_TARGET __attribute__((always_inline)) inline void start(const PackedLayout& layout,
                                                                  const uint8_t* panel,
                                                                  int64_t first_input,
                                                                  int64_t num_inputs) {
    panel_ = panel;
    high_bits_ = panel + layout.high_bits();
    const auto [first, last] = groups_of(layout, first_input, num_inputs);
    Loops::template read_scales<codes, has_minima>(
        layout, panel, first, last,
        [&](int64_t i, const Vector* scales, const Vector* minima) __attribute__((always_inline))
        MOE_EXT_TARGET {
          MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
            Loops::store_factor(scales[v], scales_ + i * kPanelOutputs + v * Loops::kLanes);
            if constexpr (has_minima) {
              Loops::store_factor(minima[v], minima_ + i * kPanelOutputs + v * Loops::kLanes);
            }
          }
        });
  }

  // Computes w of the inputs of a unit, for the lanes of vector v; see `values`. `group` counts
  // from that of the first input.
  template <bool reads_on>
  MOE_EXT_TARGET __attribute__((always_inline)) inline void weights(const Table& table,
                                                                    int64_t group, int64_t unit,
                                                                    int v, Vector* w) const {
    const int64_t place = group * kPanelOutputs;
    Vector scale, minimum;
    Loops::load(scales_ + place, v, scale);
    if constexpr (has_minima) Loops::load(minima_ + place, v, minimum);
    Loops::template values<codes, reads_on>(table.values, panel_, high_bits_, unit, v, w);
    MOE_EXT_UNROLL for (int i = 0; i < kPackedInputs; ++i) {
      if constexpr (has_minima) {
        Loops::scale_and_subtract(scale, minimum, w[i]);
      } else {
        w[i] *= scale;
      }
      if constexpr (kRounds<Simd>) Simd::round(w[i]);
    }
  }

  // Computes the K-groups of a unit.
  MOE_EXT_TARGET __attribute__((always_inline)) inline void k_groups(const Table& table,
                                                                     int64_t group, int64_t unit,
                                                                     int v, Vector* to) const {
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
  using Loops = typename Panel::Loops;
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
        MOE_EXT_UNROLL for (int v = 0; v < Loops::kVectors; ++v) {
          typename Loops::Vector w[kPackedInputs];
          // What is behind may not be in the cache yet.
          source.template weights</*reads_on=*/false>(table, group, unit, v, w);
          MOE_EXT_UNROLL for (int i = 0; i < kPackedInputs; i += kStep) {
            void* place = row + (i / kStep * ld + v * Loops::kLanes) * kSize;
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

// The columns of C for kPanels panels.
template <typename Panel, int kRows, int kPanels>
MOE_EXT_TARGET MOE_EXT_KERNEL void multiply_panels(const PackedLayout& layout,
                                                   const uint8_t* panels, const uint8_t* end,
                                                   const uint8_t* next, int64_t kc, const float* a,
                                                   int64_t lda, int64_t num_rows, bool add,
                                                   float* c, int64_t ldc) {
  using Simd = typename Panel::Simd;
  using Loops = typename Panel::Loops;
  using Vector = typename Loops::Vector;
  constexpr int kVectors = Loops::kVectors, kNumbers = Panel::kNumbers;
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
                      if constexpr (requires {
                                      Simd::multiply_add_once(number, w[p][v][i], total);
                                    }) {
                        Simd::multiply_add_once(number, w[p][v][i], total);
                      } else {
                        Simd::multiply_add(number, w[p][v][i], total);
                      }
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
    MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
      if (r >= num_rows) break;
      MOE_EXT_UNROLL for (int p = 0; p < kPanels; ++p) {
        MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
          float* to = c + r * ldc + p * kPanelOutputs + v * Loops::kLanes;
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
