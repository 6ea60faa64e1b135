// Bytes one at a time, in vectors of 16 bytes, which every processor has.
#if defined(__x86_64__) && !defined(__clang__)
#pragma GCC optimize("O2")  // only processors without AVX2 run this; O3 compiles for twice as long
#endif

#include <cstdint>
#include <cstring>

#include "../vectorize.h"

#define MOE_EXT_TARGET
#include "integer_loops.h"

namespace moe_ext::cpu {
namespace {

struct PortableBytes {
  static constexpr int kBytes = 16;

  template <typename Bits, typename Integers>
  MOE_EXT_KERNEL void dot(const Bits& codes, const int8_t* numbers, Integers& sum) {
    for (int byte = 0; byte < 4; ++byte) {
      sum += (Integers)(codes >> 8 * byte & 0xff) * int32_t{numbers[byte]};
    }
  }

  template <typename Bits>
  MOE_EXT_KERNEL void look_up(const uint8_t* table, Bits& codes) {
    uint8_t bytes[kBytes];
    std::memcpy(bytes, &codes, kBytes);
    for (uint8_t& byte : bytes) byte = table[byte];
    std::memcpy(&codes, bytes, kBytes);
  }
};

}  // namespace

IntegerKernel portable_integer_kernel(const PackedFormat& format) {
  return integer_kernel_of<PortableBytes>(format);
}

}  // namespace moe_ext::cpu
