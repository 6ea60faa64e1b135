// Packed weights that are rounded to half precision, for instruction sets that multiply half
// precision as floats. The source file includes this header after it has defined MOE_EXT_TARGET.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <type_traits>

#include "../../kernels/types.h"
#include "../vectorize.h"
#include "simd.h"

namespace moe_ext::cpu {
namespace {

// Two chains of multiply-adds: the order of the instruction tdpbf16ps (widened_loops.h).
template <typename Base>
struct TwoChains : Base {
  static constexpr int kChains = 2;
};

// Rounds weights to half_t.
template <typename Base, typename half_t>
struct RoundedWeights : Base {
  using typename Base::Aligned;

  // A NaN has no bits behind those of half_t.
  MOE_EXT_TARGET MOE_EXT_KERNEL void round(Aligned& w) {
    if constexpr (std::is_same_v<half_t, c10::BFloat16>) {
      typedef uint32_t Bits __attribute__((vector_size(sizeof(Aligned))));
      const Bits bits = (Bits)w;
      w = (Aligned)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
    } else {
      round_to_float16(w);
    }
  }

 private:
  MOE_EXT_TARGET MOE_EXT_KERNEL void round_to_float16(Aligned& w) {
#if defined(__x86_64__)
    if constexpr (sizeof(Aligned) == 64) {
      const __m256i halves = _mm512_maskz_cvtps_ph(0xffff, (__m512)w, _MM_FROUND_TO_NEAREST_INT);
      w = (Aligned)_mm512_maskz_cvtph_ps(0xffff, halves);
      return;
    } else if constexpr (sizeof(Aligned) == 32) {
      w = (Aligned)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)w, _MM_FROUND_TO_NEAREST_INT));
      return;
    }
#endif
    for (size_t l = 0; l < sizeof(Aligned) / 4; ++l) w[l] = static_cast<float>(c10::Half(w[l]));
  }
};

}  // namespace
}  // namespace moe_ext::cpu
