// NEON with BF16: each lane multiplies two pairs of bfloat16 numbers and adds the products.
#if defined(__aarch64__)
#include "../vectorize.h"

#define MOE_EXT_TARGET MOE_EXT_TARGET_NEON_BF16
#include "micro_kernel_loops.h"
#include "neon.h"

namespace moe_ext::cpu {
namespace {

// bfdot by element
struct Bfdot {
  template <typename Vector>
  MOE_EXT_TARGET MOE_EXT_KERNEL void add(const Vector& a, int lane, const Vector& b, Vector& sum) {
    asm volatile("bfdot %0.4s, %1.8h, %2.2h[%3]" : "+w"(sum) : "w"(b), "w"(a), "i"(lane));
  }
};

struct NeonBf16 : NeonGroups<float, Bfdot> {
  static constexpr bool kPairs = true;

  MOE_EXT_TARGET MOE_EXT_KERNEL void multiply_add(const float& a, const Aligned& b, Aligned& sum) {
    const float32x4_t pairs = vdupq_n_f32(a);
    asm("bfdot %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(b), "w"(pairs));
  }

  MOE_EXT_TARGET MOE_EXT_KERNEL void store_rounded(const Aligned* vectors, bool /*non_temporal*/,
                                                   c10::BFloat16* to) {
    Aligned rounded = vectors[0];
    asm("bfcvtn %0.4h, %0.4s\n\tbfcvtn2 %0.8h, %1.4s" : "+&w"(rounded) : "w"(vectors[1]));
    *reinterpret_cast<Vector<uint16_t, kBytes>::Unaligned*>(to) =
        __builtin_bit_cast(Vector<uint16_t, kBytes>::Aligned, rounded);
  }
};

}  // namespace

const MicroKernels<float>& neon_bf16_micro_kernels() {
  static constexpr auto kKernels = make_micro_kernels<float, NeonBf16>("NEON-BF16");
  return kKernels;
}

}  // namespace moe_ext::cpu
#endif
