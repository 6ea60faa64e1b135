// The loops that unpack weights. The source file of each instruction set includes this header after
// it has defined MOE_EXT_TARGET, as for micro_kernel_loops.h.
//
// `Simd` describes the instruction set, as there.
#pragma once

#include <c10/util/Half.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

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
  // What is prefetched is this far behind the panel that is read.
  static constexpr int64_t kLinesAhead = 8 << 10;

  // Prefetches nothing new.
  Ahead() = default;

  // `end` is that of the panels; prefetch() is called num_steps times.
  Ahead(const uint8_t* panel, const uint8_t* end, int64_t panel_bytes, int64_t num_steps)
      : next_(std::min(panel + panel_bytes + kLinesAhead, end)),
        end_(end),
        step_((panel_bytes + num_steps - 1) / num_steps) {}

  // Prefetches a step of at most 64 kLines bytes.
  template <int kLines>
  MOE_EXT_TARGET __attribute__((always_inline)) inline void prefetch() {
    MOE_EXT_UNROLL for (int line = 0; line < kLines; ++line) {
      __builtin_prefetch(next_ + 64 * line);
    }
    const uint8_t* before = std::exchange(next_, std::min(next_ + step_, end_));
    if (page(next_) != page(before)) {
      __builtin_prefetch(next_ + kPagesAhead, /*rw=*/0, /*locality=*/2);
    }
  }

 private:
  static constexpr int64_t kPagesAhead = 32 << 10;

  static uintptr_t page(const uint8_t* byte) { return reinterpret_cast<uintptr_t>(byte) / 4096; }

  const uint8_t *next_ = nullptr, *end_ = nullptr;
  int64_t step_ = 0;
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
    constexpr bool kSigned = std::is_same_v<byte_t, int8_t>;
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

  // Calls body(scales, minima) for the groups of a panel from `first` to `last`; there may be no
  // minima.
  template <Scales kind, typename Body>
  MOE_EXT_TARGET MOE_EXT_KERNEL void for_groups_of(PackedLayout layout, const uint8_t* panel,
                                                   int64_t first, int64_t last, const Body& body) {
    constexpr int64_t kGroups = PackedLayout::groups_of_block(kind);
    constexpr bool kHasMinima = kind == Scales::kUint8AndMinOfBlocks;
    const uint8_t* from = panel + layout.scales();
    Vector scales[kVectors], minima[kVectors] = {};
    if constexpr (kGroups > 0) {
      Vector factors[kVectors], factors_of_minima[kVectors];
      for (int64_t group = first; group < last;) {
        const int64_t block = group / kGroups;
        convert_halves(panel + layout.factors() + block * 32, factors);
        if constexpr (kHasMinima) {
          convert_halves(panel + layout.factors_of_minima() + block * 32, factors_of_minima);
        }
        for (const int64_t end = std::min(last, (block + 1) * kGroups); group < end; ++group) {
          using byte_t = std::conditional_t<kHasMinima, uint8_t, int8_t>;
          convert_product<byte_t>(from + group * 16, factors, scales);
          if constexpr (kHasMinima) {
            convert_product<byte_t>(panel + layout.minima() + group * 16, factors_of_minima,
                                    minima);
          }
          body(scales, minima);
        }
      }
      return;
    }
    for (int64_t group = first; group < last; ++group) {
      if constexpr (kind == Scales::kFloat16) {
        convert_halves(from + group * 32, scales);
      } else {
        MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
          if constexpr (kind == Scales::kFloat32) {
            load(from + group * 64, v, scales[v]);
          } else {
            Integers exponents;
            widen<uint8_t>(from + group * 16, v, exponents);
            const Bits bits = (Bits)exponents << 23;
            scales[v] = (Vector)(bits | ((Bits)(bits == 0) & 0x400000));
          }
        }
      }
      body(scales, minima);
    }
  }

  template <typename Body>
  MOE_EXT_TARGET MOE_EXT_KERNEL void for_groups(const PackedLayout& layout, const uint8_t* panel,
                                                int64_t first, int64_t last, const Body& body) {
    switch (layout.format->scales) {
      case Scales::kFloat32:
        return for_groups_of<Scales::kFloat32>(layout, panel, first, last, body);
      case Scales::kFloat16:
        return for_groups_of<Scales::kFloat16>(layout, panel, first, last, body);
      case Scales::kE8M0:
        return for_groups_of<Scales::kE8M0>(layout, panel, first, last, body);
      case Scales::kInt8OfBlocks:
        return for_groups_of<Scales::kInt8OfBlocks>(layout, panel, first, last, body);
      case Scales::kUint8AndMinOfBlocks:
        return for_groups_of<Scales::kUint8AndMinOfBlocks>(layout, panel, first, last, body);
    }
  }

  // Reads the scales, and the minima if there are any, of a group.
  MOE_EXT_TARGET MOE_EXT_KERNEL void read_scales(const PackedLayout& layout, const uint8_t* panel,
                                                 int64_t group, Vector* to_scales,
                                                 Vector* to_minima) {
    for_groups(
        layout, panel, group, group + 1,
        [&](const Vector* scales, const Vector* minima) __attribute__((always_inline))
        MOE_EXT_TARGET {
          MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
            to_scales[v] = scales[v];
            to_minima[v] = minima[v];
          }
        });
  }

  // Writes the scales [groups, 16] of a panel, and then the minima if there are any.
  MOE_EXT_TARGET MOE_EXT_KERNEL void read_all_scales(const PackedLayout& layout,
                                                     const uint8_t* panel, float* to) {
    float* minimum = to + layout.num_groups() * kPanelOutputs;
    const bool has_minima = layout.has_minima();
    for_groups(
        layout, panel, 0, layout.num_groups(),
        [&](const Vector* scales, const Vector* minima) __attribute__((always_inline))
        MOE_EXT_TARGET {
          std::memcpy(to, scales, kVectors * kBytes);
          to += kPanelOutputs;
          if (!has_minima) return;
          std::memcpy(minimum, minima, kVectors * kBytes);
          minimum += kPanelOutputs;
        });
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

  // Computes the values of input i of a unit of 8 inputs. `low` and `high` are the unit's words:
  // for 8-bit codes those of four inputs each, else the low 4 bits and the high 2 bits.
  template <Codes codes>
  MOE_EXT_TARGET MOE_EXT_KERNEL void value(const float* table, const Bits& low, const Bits& high,
                                           int i, Vector& to) {
    const int shift = i < 4 ? 8 * i : 8 * (i - 4) + 4;
    if constexpr (codes == Codes::kTable) {
      look_up(table, low >> shift, to);
    } else if constexpr (codes == Codes::kSixBits) {
      convert((Integers)((low >> shift & 15) | (high >> (8 * (i % 4) + 2 * (i / 4)) & 3) << 4) - 32,
              to);
    } else {
      const Bits& words = i < 4 ? low : high;
      if constexpr (codes == Codes::kInt8) {
        convert((Integers)(words << (24 - 8 * (i % 4))) >> 24, to);
      } else {
        from_e4m3(words >> 8 * (i % 4), to);
      }
    }
  }

  // Loads the words of a unit.
  template <Codes codes>
  MOE_EXT_TARGET MOE_EXT_KERNEL void load_unit(const PackedLayout& layout, const uint8_t* panel,
                                               int64_t unit, int v, Bits& low, Bits& high) {
    if constexpr (codes == Codes::kTable || codes == Codes::kSixBits) {
      load(panel + unit * 64, v, low);
      if constexpr (codes == Codes::kSixBits) {
        load(panel + layout.high_bits() + unit / 2 * 64, v, high);
        high >>= static_cast<uint32_t>(unit % 2 * 4);
      }
    } else {
      load(panel + unit * 128, v, low);
      load(panel + unit * 128 + 64, v, high);
    }
  }
};

// A panel while it is read.
template <typename Simd, Codes codes, bool has_minima>
struct Panel {
  using Loops = Unpacking<Simd>;
  using Vector = typename Loops::Vector;
  static constexpr int kVectors = Loops::kVectors;
  // What is prefetched for the next inputs.
  static constexpr int64_t kBytesAhead = 1024;

  const uint8_t* bytes;
  Vector scales[kVectors], minima[kVectors];

  // Computes w of the unit's inputs for the lanes of vector v.
  MOE_EXT_TARGET __attribute__((always_inline)) inline void weights(const PackedLayout& layout,
                                                                    const float* table,
                                                                    int64_t unit, int v,
                                                                    Vector* w) const {
    typename Loops::Bits low{}, high{};
    __builtin_prefetch(bytes + unit * layout.bytes_of_unit() + kBytesAhead);
    Loops::template load_unit<codes>(layout, bytes, unit, v, low, high);
    MOE_EXT_UNROLL for (int i = 0; i < kPackedInputs; ++i) {
      Loops::template value<codes>(table, low, high, i, w[i]);
      w[i] *= scales[v];
      if constexpr (has_minima) w[i] -= minima[v];
    }
  }
};

// Calls start(group) and unit(unit, num_inputs) for the inputs from first_input, a multiple of 8.
// Only the last unit may have fewer than 8 inputs.
template <typename Start, typename Unit>
MOE_EXT_TARGET MOE_EXT_KERNEL void for_units(const PackedLayout& layout, int64_t first_input,
                                             int64_t num_inputs, const Start& start,
                                             const Unit& unit) {
  const int64_t end = first_input + num_inputs;
  for (int64_t input = first_input; input < end;) {
    const int64_t group = input / layout.group;
    const int64_t end_of_group = std::min(end, (group + 1) * layout.group);
    start(group);
    for (; input + kPackedInputs <= end_of_group; input += kPackedInputs) {
      unit(input / kPackedInputs, std::integral_constant<int64_t, kPackedInputs>());
    }
    if (input < end_of_group) {
      unit(input / kPackedInputs, end_of_group - input);
      return;
    }
  }
}

// An UnpackKernel.
template <typename Simd, Codes codes, bool has_minima, Unpacked unpacked>
MOE_EXT_TARGET void unpack_kernel(const PackedLayout& layout, const uint8_t* panel,
                                  int64_t first_input, int64_t num_inputs, void* to, int64_t ld) {
  using Panel = Panel<Simd, codes, has_minima>;
  using Loops = typename Panel::Loops;
  constexpr int kStep = unpacked == Unpacked::kPairs ? 2 : 1;
  constexpr int64_t kSize = unpacked == Unpacked::kRounded ? 2 : 4;  // of a number in bytes
  float table alignas(64)[16];
  std::copy_n(layout.format->values, 16, table);
  Panel source{};
  source.bytes = panel;
  auto* row = static_cast<uint8_t*>(to);
  for_units(
      layout, first_input, num_inputs,
      [&](int64_t group) __attribute__((always_inline))
      MOE_EXT_TARGET { Loops::read_scales(layout, panel, group, source.scales, source.minima); },
      [&](int64_t unit, int64_t) __attribute__((always_inline)) MOE_EXT_TARGET {
        MOE_EXT_UNROLL for (int v = 0; v < Loops::kVectors; ++v) {
          typename Loops::Vector w[kPackedInputs];
          source.weights(layout, table, unit, v, w);
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
template <typename Simd, Codes codes, bool has_minima, int kRows, int kPanels>
MOE_EXT_TARGET MOE_EXT_KERNEL void multiply_panels(const PackedLayout& layout,
                                                   const uint8_t* panels, int64_t first_input,
                                                   int64_t num_inputs, const float* a,
                                                   int64_t num_rows, bool add, float* c,
                                                   int64_t ldc) {
  using Panel = Panel<Simd, codes, has_minima>;
  using Loops = typename Panel::Loops;
  using Vector = typename Loops::Vector;
  constexpr int kVectors = Loops::kVectors, kNumbers = Simd::kPairs ? 2 : 1;
  float table alignas(64)[16];
  std::copy_n(layout.format->values, 16, table);
  const int64_t panel_bytes = layout.panel_bytes();
  Panel source[kPanels] = {};
  MOE_EXT_UNROLL for (int p = 0; p < kPanels; ++p) source[p].bytes = panels + p * panel_bytes;
  Vector sum[kRows][kPanels][kVectors] = {};
  for_units(
      layout, first_input, num_inputs,
      [&](int64_t group) __attribute__((always_inline)) MOE_EXT_TARGET {
        MOE_EXT_UNROLL for (int p = 0; p < kPanels; ++p) {
          Loops::read_scales(layout, source[p].bytes, group, source[p].scales, source[p].minima);
        }
      },
      [&](int64_t unit, auto size) __attribute__((always_inline)) MOE_EXT_TARGET {
        MOE_EXT_UNROLL for (int p = 0; p < kPanels; ++p) {
          MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
            Vector w[kPackedInputs];
            source[p].weights(layout, table, unit, v, w);
            MOE_EXT_UNROLL for (int i = 0; i < kPackedInputs; i += kNumbers) {
              if (i >= size) break;
              if constexpr (Simd::kPairs) Simd::join(w[i], w[i + 1], w[i]);
              MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
                const float& number = a[i / kNumbers * Simd::kAPanelWidth + r];
                if constexpr (requires { Simd::multiply_add_once(number, w[i], sum[r][p][v]); }) {
                  Simd::multiply_add_once(number, w[i], sum[r][p][v]);
                } else {
                  Simd::multiply_add(number, w[i], sum[r][p][v]);
                }
              }
            }
          }
        }
        a += kPackedInputs / kNumbers * Simd::kAPanelWidth;
      });
  MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
    if (r >= num_rows) return;
    MOE_EXT_UNROLL for (int p = 0; p < kPanels; ++p) {
      MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
        float* to = c + r * ldc + p * kPanelOutputs + v * Loops::kLanes;
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

// A FewRowsKernel.
template <typename Simd, Codes codes, bool has_minima, int kRows>
MOE_EXT_TARGET void few_rows_kernel(const PackedLayout& layout, const uint8_t* panels,
                                    int64_t num_panels, int64_t first_input, int64_t num_inputs,
                                    const float* a, int64_t num_rows, bool add, float* c,
                                    int64_t ldc) {
  // Several chains at a time hide the latency of the multiply-adds.
  constexpr int kVectors = Unpacking<Simd>::kVectors;
  constexpr int kPanels = std::clamp(16 / (kRows * kVectors * kVectors), 1, 4);
  const int64_t panel_bytes = layout.panel_bytes();
  int64_t panel = 0;
  const auto multiply = [&](auto size) __attribute__((always_inline)) MOE_EXT_TARGET {
    multiply_panels<Simd, codes, has_minima, kRows, size()>(layout, panels + panel * panel_bytes,
                                                            first_input, num_inputs, a, num_rows,
                                                            add, c + panel * kPanelOutputs, ldc);
    panel += size();
  };
  while (panel + kPanels <= num_panels) multiply(std::integral_constant<int, kPanels>());
  while (panel < num_panels) multiply(std::integral_constant<int, 1>());
}

template <typename Simd, Codes codes, bool has_minima>
constexpr CodeKernels code_kernels_of() {
  CodeKernels kernels{.unpack = unpack_kernel<Simd, codes, has_minima, Unpacked::kFloats>};
  if constexpr (Simd::kPairs) {
    kernels.unpack_rounded = unpack_kernel<Simd, codes, has_minima, Unpacked::kRounded>;
    kernels.unpack_pairs = unpack_kernel<Simd, codes, has_minima, Unpacked::kPairs>;
  }
  // AVX2 has too few registers for 8 rows.
  if constexpr (Simd::kBytes == 64) {
    kernels.few_rows[3] = few_rows_kernel<Simd, codes, has_minima, 8>;
  }
  kernels.few_rows[2] = few_rows_kernel<Simd, codes, has_minima, 4>;
  kernels.few_rows[1] = few_rows_kernel<Simd, codes, has_minima, 2>;
  kernels.few_rows[0] = few_rows_kernel<Simd, codes, has_minima, 1>;
  return kernels;
}

// Returns the kernels of an instruction set for a format.
template <typename Simd>
const CodeKernels& code_kernels_of(const PackedFormat& format) {
  static constexpr CodeKernels kTable = code_kernels_of<Simd, Codes::kTable, false>();
  static constexpr CodeKernels kTableAndMinima = code_kernels_of<Simd, Codes::kTable, true>();
  static constexpr CodeKernels kSixBits = code_kernels_of<Simd, Codes::kSixBits, false>();
  static constexpr CodeKernels kInt8 = code_kernels_of<Simd, Codes::kInt8, false>();
  static constexpr CodeKernels kE4M3 = code_kernels_of<Simd, Codes::kE4M3, false>();
  switch (format.codes) {
    case Codes::kSixBits:
      return kSixBits;
    case Codes::kInt8:
      return kInt8;
    case Codes::kE4M3:
      return kE4M3;
    default:
      return format.scales == Scales::kUint8AndMinOfBlocks ? kTableAndMinima : kTable;
  }
}

}  // namespace
}  // namespace moe_ext::cpu
