// AVX2 with FMA.
#if defined(__x86_64__)
#include <immintrin.h>

#include "../vectorize.h"

#define MOE_EXT_TARGET MOE_EXT_TARGET_AVX2
#include "micro_kernel_loops.h"
#include "unpacking_loops.h"

namespace moe_ext::cpu {
namespace {

template <typename acc_t>
struct Avx2 {
  static constexpr int kBytes = 32, kMaxRows = 6, kAPanelWidth = 8;
  static constexpr bool kPairs = false, kHasStream = false, kHasGroups = false;
  using Aligned = typename Vector<acc_t, kBytes>::Aligned;

  MOE_EXT_TARGET MOE_EXT_KERNEL void multiply_add(const acc_t& a, const Aligned& b, Aligned& sum) {
    if constexpr (std::is_same_v<acc_t, float>) {
      sum = _mm256_fmadd_ps(_mm256_set1_ps(a), b, sum);
    } else {
      sum = _mm256_fmadd_pd(_mm256_set1_pd(a), b, sum);
    }
  }
};

struct Unpack256 {
  static constexpr int kBytes = 32;

  template <typename Bits, typename Vector>
  MOE_EXT_TARGET MOE_EXT_KERNEL void look_up(const float* table, const Bits& index, Vector& to) {
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), (__m256i)index);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), (__m256i)index);
    // The sign bit selects.
    to = (Vector)_mm256_blendv_ps(low, high, (__m256)(index << 28));
  }

  template <typename Vector>
  MOE_EXT_TARGET MOE_EXT_KERNEL void from_half(const uint8_t* from, Vector& to) {
    to = (Vector)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
};

}  // namespace

UnpackKernel avx2_unpack_kernel(Codes codes) { return unpack_kernel_of<Unpack256>(codes); }

template <typename acc_t>
const MicroKernels<acc_t>& avx2_micro_kernels() {
  static constexpr auto kKernels = make_micro_kernels<acc_t, Avx2<acc_t>>("AVX2");
  return kKernels;
}

template const MicroKernels<float>& avx2_micro_kernels<float>();
template const MicroKernels<double>& avx2_micro_kernels<double>();

}  // namespace moe_ext::cpu
#endif
