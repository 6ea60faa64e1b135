// AVX2: products of bytes in 16 bits, which saturate above 32,767. Codes below 128 keep below it.
#if defined(__x86_64__)
#include <immintrin.h>

#include "../vectorize.h"

#define MOE_EXT_TARGET MOE_EXT_TARGET_AVX2
#include "integer_loops.h"

namespace moe_ext::cpu {
namespace {

struct Avx2Bytes {
  static constexpr int kBytes = 32;

  MOE_EXT_TARGET MOE_EXT_KERNEL __m256i products(__m256i codes, __m256i numbers) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, numbers), _mm256_set1_epi16(1));
  }

  template <typename Bits, typename Integers>
  MOE_EXT_TARGET MOE_EXT_KERNEL void dot(const Bits& codes, const int8_t* numbers, Integers& sum) {
    int32_t four;
    std::memcpy(&four, numbers, sizeof(four));
    const __m256i a = _mm256_set1_epi32(four);
    // The lower 7 bits and the highest bit apart.
    const Bits low = codes & 0x7f7f7f7f, high = codes >> 7 & 0x01010101;
    const __m256i high_sum = _mm256_slli_epi32(products((__m256i)high, a), 7);
    sum += (Integers)products((__m256i)low, a) + (Integers)high_sum;
  }

  template <typename Bits>
  MOE_EXT_TARGET MOE_EXT_KERNEL void look_up(const uint8_t* table, Bits& codes) {
    const __m256i bytes = _mm256_load_si256(reinterpret_cast<const __m256i*>(table));
    codes = (Bits)_mm256_shuffle_epi8(bytes, (__m256i)codes);
  }
};

}  // namespace

IntegerKernel avx2_integer_kernel(const PackedFormat& format) {
  return integer_kernel_of<Avx2Bytes>(format);
}

}  // namespace moe_ext::cpu
#endif
