// AVX-512. The source file includes this header after it has defined MOE_EXT_TARGET.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#include <type_traits>

#include "../vectorize.h"
#include "simd.h"

namespace moe_ext::cpu {
namespace {

template <typename acc_t>
struct Avx512 {
  static constexpr int kBytes = 64, kMaxRows = 14, kAPanelWidth = 16;
  static constexpr bool kPairs = false;
  using Aligned = typename Vector<acc_t, kBytes>::Aligned;

  MOE_EXT_TARGET MOE_EXT_KERNEL void multiply_add(const acc_t& a, const Aligned& b, Aligned& sum) {
    if constexpr (std::is_same_v<acc_t, float>) {
      sum = _mm512_fmadd_ps(_mm512_set1_ps(a), b, sum);
    } else {
      sum = _mm512_fmadd_pd(_mm512_set1_pd(a), b, sum);
    }
  }

  MOE_EXT_TARGET MOE_EXT_KERNEL void stream(acc_t* to, const Aligned& vector) {
    if constexpr (std::is_same_v<acc_t, float>) {
      _mm512_stream_ps(to, vector);
    } else {
      _mm512_stream_pd(to, vector);
    }
  }
};

}  // namespace
}  // namespace moe_ext::cpu
#endif
