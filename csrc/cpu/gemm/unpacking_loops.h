// The loops that unpack weights. The source file of each instruction set includes this header after
// it has defined MOE_EXT_TARGET, as for micro_kernel_loops.h.
//
// `Simd` describes the instruction set:
//   kBytes: the size of a vector in bytes
//   look_up: optional; the value of each 4-bit index in a table of 16
//   from_half: optional; converts float16 numbers
#pragma once

#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../vectorize.h"
#include "unpacking.h"

#ifndef MOE_EXT_TARGET
#error "MOE_EXT_TARGET must be defined before unpacking_loops.h"
#endif

namespace moe_ext::cpu {
namespace {

template <typename Simd, int kBytes = Simd::kBytes>
struct Unpacking {
  static constexpr int kLanes = kBytes / 4, kVectors = 16 / kLanes;
  typedef float Vector __attribute__((vector_size(kBytes)));
  typedef uint32_t Bits __attribute__((vector_size(kBytes)));
  typedef int32_t Integers __attribute__((vector_size(kBytes)));

  template <typename to_t>
  MOE_EXT_TARGET MOE_EXT_KERNEL void load(const void* from, int v, to_t& to) {
    std::memcpy(&to, static_cast<const uint8_t*>(from) + v * kBytes, kBytes);
  }

  // Converts 16 numbers of type from_t.
  template <typename from_t>
  MOE_EXT_TARGET MOE_EXT_KERNEL void convert(const uint8_t* from, Vector* to) {
    from_t numbers[16];
    float floats alignas(kBytes)[16];
    std::memcpy(numbers, from, sizeof(numbers));
    for (int l = 0; l < 16; ++l) floats[l] = static_cast<float>(numbers[l]);
    MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) load(floats, v, to[v]);
  }

  MOE_EXT_TARGET MOE_EXT_KERNEL void convert_halves(const uint8_t* from, Vector* to) {
    MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
      if constexpr (requires { Simd::from_half(from, to[v]); }) {
        Simd::from_half(from + v * kLanes * 2, to[v]);
      } else {
        c10::Half halves[kLanes];
        float floats alignas(kBytes)[kLanes];
        std::memcpy(halves, from + v * kLanes * 2, sizeof(halves));
        for (int l = 0; l < kLanes; ++l) floats[l] = halves[l];
        load(floats, 0, to[v]);
      }
    }
  }

  // Integers of a group times the factors of its block.
  template <typename integer_t>
  MOE_EXT_TARGET MOE_EXT_KERNEL void convert_product(const uint8_t* integers,
                                                     const uint8_t* factors, Vector* to) {
    Vector factor[kVectors];
    convert<integer_t>(integers, to);
    convert_halves(factors, factor);
    MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) to[v] *= factor[v];
  }

  // Reads the scales, and the minima if there are any, of a group.
  MOE_EXT_TARGET MOE_EXT_KERNEL void read_scales(const PackedLayout& layout, const uint8_t* panel,
                                                 int64_t group, Vector* scales, Vector* minima) {
    const uint8_t* from = panel + layout.scales();
    switch (layout.format->scales) {
      case Scales::kFloat32:
        MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) load(from + group * 64, v, scales[v]);
        return;
      case Scales::kFloat16:
        return convert_halves(from + group * 32, scales);
      case Scales::kE8M0: {
        uint32_t bits alignas(kBytes)[16];
        for (int l = 0; l < 16; ++l) {
          const uint32_t exponent = from[group * 16 + l];
          bits[l] = exponent == 0 ? 0x400000 : exponent << 23;
        }
        MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) load(bits, v, scales[v]);
        return;
      }
      case Scales::kInt8OfBlocks:
        return convert_product<int8_t>(
            from + group * 16, panel + layout.factors() + group / layout.groups_of_block() * 32,
            scales);
      case Scales::kUint8AndMinOfBlocks: {
        const int64_t block = group / layout.groups_of_block() * 32;
        convert_product<uint8_t>(from + group * 16, panel + layout.factors() + block, scales);
        convert_product<uint8_t>(panel + layout.minima() + group * 16,
                                 panel + layout.factors_of_minima() + block, minima);
        return;
      }
    }
  }

  // The value of a table for each index, of which only the low 4 bits count.
  template <typename Index, typename To>
  MOE_EXT_TARGET MOE_EXT_KERNEL void look_up(const float* table, const Index& index, To& to) {
    if constexpr (requires { Simd::look_up(table, index, to); }) {
      Simd::look_up(table, index, to);
    } else {
      for (int l = 0; l < kLanes; ++l) to[l] = table[index[l] & 15];
    }
  }

  template <typename From, typename To>
  MOE_EXT_TARGET MOE_EXT_KERNEL void to_float(const From& from, To& to) {
    to = __builtin_convertvector(from, To);
  }

  // The values of E4M3 codes in the lowest byte.
  MOE_EXT_TARGET MOE_EXT_KERNEL void from_e4m3(const Bits& codes, Vector& to) {
    const Bits magnitude = codes & 0x7f;
    // The exponent has the bias 7. Codes below 8 are multiples of 2^-9.
    Bits bits = (magnitude << 20) + (uint32_t{127 - 7} << 23);
    Vector small;
    to_float((Integers)magnitude, small);
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
      to_float((Integers)((low >> shift & 15) | (high >> 2 * i & 3) << 4) - 32, to);
    } else {
      const Bits& words = i < 4 ? low : high;
      if constexpr (codes == Codes::kInt8) {
        to_float((Integers)(words << (24 - 8 * (i % 4))) >> 24, to);
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
        high >>= static_cast<uint32_t>(unit % 2 * 16);
      }
    } else {
      load(panel + unit * 128, v, low);
      load(panel + unit * 128 + 64, v, high);
    }
  }
};

template <typename Simd, Codes codes, bool has_minima>
MOE_EXT_TARGET MOE_EXT_KERNEL void unpack(const PackedLayout& layout, const uint8_t* panel,
                                          int64_t first_input, int64_t num_inputs, float* to,
                                          int64_t ld) {
  using Unpacking = Unpacking<Simd>;
  using Vector = typename Unpacking::Vector;
  constexpr int kVectors = Unpacking::kVectors;
  float table alignas(64)[16];
  std::copy_n(layout.format->values, 16, table);
  const int64_t end = first_input + num_inputs;
  for (int64_t begin = first_input; begin < end;) {
    const int64_t group = begin / layout.group;
    const int64_t end_of_group = std::min(end, (group + 1) * layout.group);
    Vector scales[kVectors], minima[kVectors];
    Unpacking::read_scales(layout, panel, group, scales, minima);
    for (; begin < end_of_group; begin += kPackedInputs, to += kPackedInputs * ld) {
      MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
        typename Unpacking::Bits low{}, high{};
        Unpacking::template load_unit<codes>(layout, panel, begin / kPackedInputs, v, low, high);
        MOE_EXT_UNROLL for (int i = 0; i < kPackedInputs; ++i) {
          Vector w;
          Unpacking::template value<codes>(table, low, high, i, w);
          w *= scales[v];
          if constexpr (has_minima) w -= minima[v];
          std::memcpy(to + i * ld + v * Unpacking::kLanes, &w, sizeof(w));
        }
      }
    }
  }
}

template <typename Simd, Codes codes>
MOE_EXT_TARGET void unpack_panel(const PackedLayout& layout, const uint8_t* panel,
                                 int64_t first_input, int64_t num_inputs, float* to, int64_t ld) {
  if constexpr (codes == Codes::kTable) {
    if (layout.has_minima()) {
      return unpack<Simd, codes, true>(layout, panel, first_input, num_inputs, to, ld);
    }
  }
  unpack<Simd, codes, false>(layout, panel, first_input, num_inputs, to, ld);
}

template <typename Simd>
UnpackKernel unpack_kernel_of(Codes codes) {
  switch (codes) {
    case Codes::kTable: return unpack_panel<Simd, Codes::kTable>;
    case Codes::kSixBits: return unpack_panel<Simd, Codes::kSixBits>;
    case Codes::kInt8: return unpack_panel<Simd, Codes::kInt8>;
    case Codes::kE4M3: return unpack_panel<Simd, Codes::kE4M3>;
  }
  return nullptr;
}

}  // namespace
}  // namespace moe_ext::cpu
