// The layout in which the kernels read packed weights: small codes, and one scale for a group of
// inputs. moe_ext/formats makes it from the layouts of the files, and restores them.
//
// A weight W [in, out] is w = value(code) scale - minimum in float32; each operation is rounded. It
// is stored in panels of 16 outputs, [E, ceil(out / 16), panel_bytes]. A panel has rows of 16
// numbers, one for each output: first the codes, then the scales of each group of inputs.
//
//   codes of 4 bits: 32 bits with 8 inputs. Input i has the bits from 8 i for i < 4, and from
//     8 (i - 4) + 4 for the others. A code is an index of a table of 16 values.
//   codes of 6 bits: the low 4 bits as above; after all of these, 32 bits with the high 2 bits of
//     16 inputs, those of input i from 8 (i % 4) + 2 (i / 4). The value is code - 32.
//   codes of 8 bits: 32 bits with 4 inputs, in ascending order.
//
// An input or output that does not exist has the code 0 and the scale 0.
#pragma once

#include <cstdint>
#include <string_view>

namespace moe_ext {

enum class Codes { kTable, kSixBits, kInt8, kE4M3 };

// The numbers of a group's scale, as the panel has them. A block is a number of groups that share
// a factor: the scale is the factor times an integer.
enum class Scales {
  kFloat32,
  kFloat16,
  kE8M0,                // an exponent e: 2^(e - 127)
  kInt8OfBlocks,        // int8 for each group; then float16 for each block of 16 groups
  kUint8AndMinOfBlocks  // uint8 for each group, and the same for the minima; then float16 for each
                        // block of 8 groups, and the same for the minima
};

struct PackedFormat {
  std::string_view name;
  Codes codes;
  Scales scales;
  int64_t group;     // the number of inputs with one scale; 0: any
  float values[16];  // of codes of 4 bits
};

// A new format is a row here and in moe_ext/formats/_layouts.py.
#define MOE_EXT_E2M1 0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f
#define MOE_EXT_NEGATIVE_E2M1 -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f
#define MOE_EXT_OFFSET_8 -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7
inline constexpr PackedFormat kPackedFormats[] = {
    {"fp8", Codes::kE4M3, Scales::kFloat32, 0, {}},
    {"gguf_mxfp4", Codes::kTable, Scales::kE8M0, 32, {MOE_EXT_E2M1, 0.0f, MOE_EXT_NEGATIVE_E2M1}},
    {"gguf_q4_0", Codes::kTable, Scales::kFloat16, 32, {MOE_EXT_OFFSET_8}},
    {"gguf_q4_k",
     Codes::kTable,
     Scales::kUint8AndMinOfBlocks,
     32,
     {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}},
    {"gguf_q6_k", Codes::kSixBits, Scales::kInt8OfBlocks, 16, {}},
    {"gguf_q8_0", Codes::kInt8, Scales::kFloat16, 32, {}},
    {"int4", Codes::kTable, Scales::kFloat32, 0, {MOE_EXT_OFFSET_8}},
    {"int8", Codes::kInt8, Scales::kFloat32, 0, {}},
    {"mxfp4", Codes::kTable, Scales::kE8M0, 32, {MOE_EXT_E2M1, -0.0f, MOE_EXT_NEGATIVE_E2M1}},
    // Quantiles of a normal distribution (arXiv 2305.14314, App. E).
    {"nf4",
     Codes::kTable,
     Scales::kFloat32,
     64,
     {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
      -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
      0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
      0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f}},
};
#undef MOE_EXT_E2M1
#undef MOE_EXT_NEGATIVE_E2M1
#undef MOE_EXT_OFFSET_8

constexpr int64_t kPanelOutputs = 16;
// Panels start at multiples of this, and so do the codes of 8 inputs.
constexpr int64_t kPanelAlignment = 64;
// A group that is not a whole row has a multiple of this number of inputs.
constexpr int64_t kPackedInputs = 8;

// The sizes of the packed weights of one layer.
struct PackedLayout {
  const PackedFormat* format;
  int64_t inputs, outputs;
  int64_t group;  // the number of inputs with one scale

  constexpr int64_t num_groups() const { return (inputs + group - 1) / group; }
  constexpr int64_t num_panels() const { return (outputs + kPanelOutputs - 1) / kPanelOutputs; }

  // Where the parts of a panel begin, in bytes.
  constexpr int64_t high_bits() const { return units() * bytes_of_unit(); }
  constexpr int64_t scales() const {
    return high_bits() + (format->codes == Codes::kSixBits ? (units() + 1) / 2 * 64 : 0);
  }
  constexpr int64_t minima() const { return scales() + num_groups() * row_of_scales(); }
  constexpr int64_t factors() const { return minima() + (has_minima() ? num_groups() * 16 : 0); }
  constexpr int64_t factors_of_minima() const { return factors() + num_blocks() * 32; }
  constexpr int64_t panel_bytes() const {
    const int64_t end = factors_of_minima() + (has_minima() ? num_blocks() * 32 : 0);
    return (end + kPanelAlignment - 1) / kPanelAlignment * kPanelAlignment;
  }
  constexpr int64_t bytes() const { return num_panels() * panel_bytes(); }  // of an expert

  // Whether the values are small integers, up to a factor, which integer arithmetic needs.
  constexpr bool is_integer() const {
    if (format->codes == Codes::kE4M3) return false;
    for (const float value : format->values) {
      if (value * 2 != static_cast<float>(static_cast<int>(value * 2))) return false;
    }
    return true;
  }

  constexpr bool has_minima() const { return format->scales == Scales::kUint8AndMinOfBlocks; }
  // The number of groups in a block, or 0.
  constexpr int64_t groups_of_block() const { return groups_of_block(format->scales); }
  static constexpr int64_t groups_of_block(Scales scales) {
    return scales == Scales::kUint8AndMinOfBlocks ? 8 : scales == Scales::kInt8OfBlocks ? 16 : 0;
  }
  // The bytes of the codes of 8 inputs, without the high bits.
  constexpr int64_t bytes_of_unit() const {
    return format->codes == Codes::kInt8 || format->codes == Codes::kE4M3 ? 128 : 64;
  }
  // The bytes of the scales of a group.
  constexpr int64_t row_of_scales() const {
    switch (format->scales) {
      case Scales::kFloat32:
        return 64;
      case Scales::kFloat16:
        return 32;
      default:
        return 16;
    }
  }

 private:
  constexpr int64_t units() const { return (inputs + kPackedInputs - 1) / kPackedInputs; }
  constexpr int64_t num_blocks() const {
    const int64_t size = groups_of_block();
    return size == 0 ? 0 : (num_groups() + size - 1) / size;
  }
};

}  // namespace moe_ext
