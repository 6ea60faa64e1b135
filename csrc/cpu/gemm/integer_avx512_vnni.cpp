// AVX512-VNNI: each lane multiplies four pairs of bytes and adds the products.
#if defined(__x86_64__)
#include <immintrin.h>

#include "../vectorize.h"

#define MOE_EXT_TARGET MOE_EXT_TARGET_AVX512_VNNI
#include "integer_loops.h"

namespace moe_ext::cpu {
namespace {

struct Avx512Vnni {
  static constexpr int kBytes = 64;

  template <typename Bits, typename Integers>
  MOE_EXT_TARGET MOE_EXT_KERNEL void dot(const Bits& codes, const int8_t* numbers, Integers& sum) {
    int32_t four;
    std::memcpy(&four, numbers, sizeof(four));
    sum = (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four));
  }

  template <typename Bits>
  MOE_EXT_TARGET MOE_EXT_KERNEL void look_up(const uint8_t* table, Bits& codes) {
    codes = (Bits)_mm512_shuffle_epi8(_mm512_load_si512(table), (__m512i)codes);
  }
};

}  // namespace

IntegerKernel avx512_vnni_integer_kernel(const PackedFormat& format) {
  return integer_kernel_of<Avx512Vnni>(format);
}

}  // namespace moe_ext::cpu
#endif
