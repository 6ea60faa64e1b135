// NEON, the vectors of every 64-bit Arm processor.
#if defined(__aarch64__)
#include "../vectorize.h"

#define MOE_EXT_TARGET MOE_EXT_TARGET_NEON
#include "micro_kernel_loops.h"
#include "neon.h"

namespace moe_ext::cpu {
namespace {

// fmla by element
struct Fmla {
  template <typename Vector>
  MOE_EXT_KERNEL void add(const Vector& a, int lane, const Vector& b, Vector& sum) {
    if constexpr (sizeof(a[0]) == 4) {
      asm volatile("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum) : "w"(b), "w"(a), "i"(lane));
    } else {
      asm volatile("fmla %0.2d, %1.2d, %2.d[%3]" : "+w"(sum) : "w"(b), "w"(a), "i"(lane));
    }
  }
};

template <typename acc_t>
struct Neon : NeonGroups<acc_t, Fmla> {
  static constexpr bool kPairs = false;
  using Aligned = typename NeonGroups<acc_t, Fmla>::Aligned;

  MOE_EXT_KERNEL void multiply_add(const acc_t& a, const Aligned& b, Aligned& sum) {
    if constexpr (std::is_same_v<acc_t, float>) {
      sum = (Aligned)vfmaq_n_f32((float32x4_t)sum, (float32x4_t)b, a);
    } else {
      sum = (Aligned)vfmaq_n_f64((float64x2_t)sum, (float64x2_t)b, a);
    }
  }
};

}  // namespace

template <typename acc_t>
const MicroKernels<acc_t>& neon_micro_kernels() {
  static constexpr auto kKernels = make_micro_kernels<acc_t, Neon<acc_t>>("NEON");
  return kKernels;
}

template const MicroKernels<float>& neon_micro_kernels<float>();
template const MicroKernels<double>& neon_micro_kernels<double>();

}  // namespace moe_ext::cpu
#endif
