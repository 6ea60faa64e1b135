// The numbers of packed weights, one at a time.
#pragma once

#include <torch/headeronly/util/Float8_e4m3fn.h>

#include <cstdint>

#include "../kernels/types.h"
#include "../packed.h"
#include "elementary.h"

namespace moe_ext::math {

// Returns a float16 number.
MOE_EXT_INLINE float from_half(const uint8_t* bytes) {
  return c10::Half(static_cast<uint16_t>(bytes[0] | bytes[1] << 8), c10::Half::from_bits());
}

// Returns w of an input and an output of a panel; output < 16.
MOE_EXT_INLINE float unpacked(const PackedLayout& layout, const uint8_t* panel, int64_t input,
                              int64_t output) {
  const PackedFormat& format = *layout.format;
  const int64_t unit = input / kPackedInputs, i = input % kPackedInputs;
  const uint8_t* codes = panel + unit * layout.bytes_of_unit();
  float value;
  if (layout.bytes_of_unit() == 64) {
    int code = codes[output * 4 + i % 4] >> (i < 4 ? 0 : 4) & 15;
    if (format.codes == Codes::kSixBits) {
      const int64_t place = input % (2 * kPackedInputs);
      const uint8_t* high = panel + layout.high_bits() + unit / 2 * 64 + output * 4 + place % 4;
      code |= (*high >> place / 4 * 2 & 3) << 4;
      value = static_cast<float>(code - 32);
    } else {
      value = format.values[code];
    }
  } else {
    const uint8_t code = codes[i / 4 * 64 + output * 4 + i % 4];
    value = format.codes == Codes::kE4M3
                ? float{c10::Float8_e4m3fn(code, c10::Float8_e4m3fn::from_bits())}
                : static_cast<float>(static_cast<int8_t>(code));
  }

  const int64_t group = input / layout.group, lane = group * kPanelOutputs + output;
  const uint8_t* scales = panel + layout.scales();
  const int64_t block =
      layout.groups_of_block() == 0 ? 0 : group / layout.groups_of_block() * kPanelOutputs + output;
  const auto factor = [&](int64_t place) { return from_half(panel + place + block * 2); };
  switch (format.scales) {
    case Scales::kFloat32: {
      uint32_t bits = 0;
      for (int byte = 0; byte < 4; ++byte) {
        bits |= uint32_t{scales[lane * 4 + byte]} << 8 * byte;
      }
      return value * __builtin_bit_cast(float, bits);
    }
    case Scales::kFloat16:
      return value * from_half(scales + lane * 2);
    case Scales::kE8M0:
      return value * __builtin_ldexpf(1.0f, int{scales[lane]} - 127);
    case Scales::kInt8OfBlocks:
      return value *
             (factor(layout.factors()) * static_cast<float>(static_cast<int8_t>(scales[lane])));
    case Scales::kUint8AndMinOfBlocks: {
      const float scale = factor(layout.factors()) * static_cast<float>(scales[lane]);
      const float minimum =
          factor(layout.factors_of_minima()) * static_cast<float>(panel[layout.minima() + lane]);
      return value * scale - minimum;
    }
  }
  return 0.0f;
}

}  // namespace moe_ext::math
