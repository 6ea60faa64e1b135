// AVX2 with FMA. The source file includes this header after it has defined MOE_EXT_TARGET.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#include <type_traits>

#include "../vectorize.h"
#include "simd.h"

namespace moe_ext::cpu {
namespace {

template <typename acc_t>
struct Avx2 {
  static constexpr int kBytes = 32, kMaxRows = 6, kAPanelWidth = 8;
  static constexpr bool kPairs = false;
  using Aligned = typename Vector<acc_t, kBytes>::Aligned;

  MOE_EXT_TARGET MOE_EXT_KERNEL void multiply_add(const acc_t& a, const Aligned& b, Aligned& sum) {
    if constexpr (std::is_same_v<acc_t, float>) {
      sum = _mm256_fmadd_ps(_mm256_set1_ps(a), b, sum);
    } else {
      sum = _mm256_fmadd_pd(_mm256_set1_pd(a), b, sum);
    }
  }
};

}  // namespace
}  // namespace moe_ext::cpu
#endif
