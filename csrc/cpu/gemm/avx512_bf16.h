// AVX512-BF16: each lane multiplies two pairs of bfloat16 numbers and adds the products. The source
// file includes this header after it has defined MOE_EXT_TARGET.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#include "../../kernels/types.h"
#include "../vectorize.h"
#include "simd.h"

namespace moe_ext::cpu {
namespace {

struct Avx512Bf16 {
  static constexpr int kBytes = 64, kMaxRows = 14, kAPanelWidth = 16;
  static constexpr bool kPairs = true;
  using Aligned = typename Vector<float, kBytes>::Aligned;

  MOE_EXT_TARGET MOE_EXT_KERNEL void multiply_add(const float& a, const Aligned& b, Aligned& sum) {
    const __m512i pairs = _mm512_set1_epi32(__builtin_bit_cast(int32_t, a));
    // With gcc 12, the intrinsic needs up to 15% more instructions, because gcc copies the sums.
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(b), "v"(pairs));
  }

  MOE_EXT_TARGET MOE_EXT_KERNEL void multiply_add_once(const float& a, const Aligned& b,
                                                       Aligned& sum) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(b), "m"(a));
  }

  // Rounds two vectors to bfloat16 and joins the numbers of each lane to a pair.
  MOE_EXT_TARGET MOE_EXT_KERNEL void join(const Aligned& even, const Aligned& odd, Aligned& to) {
    const auto halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    typedef uint16_t Halves __attribute__((vector_size(kBytes)));
    constexpr Halves kOrder = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                               8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    to = (Aligned)_mm512_permutexvar_epi16((__m512i)kOrder, halves);
  }

  MOE_EXT_TARGET MOE_EXT_KERNEL void stream(float* to, const Aligned& vector) {
    _mm512_stream_ps(to, vector);
  }

  MOE_EXT_TARGET MOE_EXT_KERNEL void store_rounded(const Aligned& vector, void* to) {
    _mm256_storeu_si256(static_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)vector));
  }

  MOE_EXT_TARGET MOE_EXT_KERNEL void store_rounded(const Aligned* vectors, bool non_temporal,
                                                   c10::BFloat16* to) {
    const auto rounded = (__m512i)_mm512_cvtne2ps_pbh(vectors[1], vectors[0]);
    if (non_temporal && reinterpret_cast<uintptr_t>(to) % kBytes == 0) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to), rounded);
    } else {
      _mm512_storeu_si512(to, rounded);
    }
  }
};

}  // namespace
}  // namespace moe_ext::cpu
#endif
