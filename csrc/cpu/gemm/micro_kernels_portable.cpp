// Vectors of 16 bytes, which every processor has.
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define MOE_EXT_TARGET
#include "micro_kernel_loops.h"

namespace moe_ext::cpu {
namespace {

template <typename acc_t>
struct Portable {
  static constexpr int kBytes = 16, kMaxRows = 6, kAPanelWidth = 8;
  static constexpr bool kPairs = false, kHasStream = false;
  using Aligned = typename Vector<acc_t, kBytes>::Aligned;

  // x86-64 without FMA has no fused multiply-add; each product is rounded first.
  MOE_EXT_KERNEL void multiply_add(const acc_t& a, const Aligned& b, Aligned& sum) {
#if defined(__aarch64__)
    if constexpr (std::is_same_v<acc_t, float>) {
      sum = (Aligned)vfmaq_n_f32((float32x4_t)sum, (float32x4_t)b, a);
    } else {
      sum = (Aligned)vfmaq_n_f64((float64x2_t)sum, (float64x2_t)b, a);
    }
#else
    sum += a * b;
#endif
  }
};

}  // namespace

template <typename acc_t>
const MicroKernels<acc_t>& portable_micro_kernels() {
  static constexpr auto kKernels = make_micro_kernels<acc_t, Portable<acc_t>>("portable");
  return kKernels;
}

template const MicroKernels<float>& portable_micro_kernels<float>();
template const MicroKernels<double>& portable_micro_kernels<double>();

}  // namespace moe_ext::cpu
