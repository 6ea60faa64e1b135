// AVX2 with FMA.
#if defined(__x86_64__)
#include "../vectorize.h"

#define MOE_EXT_TARGET MOE_EXT_TARGET_AVX2
#include "avx2.h"
#include "micro_kernel_loops.h"
#include "unpack_kernels.h"
#include "widened_loops.h"

namespace moe_ext::cpu {

const CodeKernels& avx2_code_kernels(const PackedFormat& format) {
  return code_kernels_of<Avx2<float>>(format);
}

template <typename acc_t>
const MicroKernels<acc_t>& avx2_micro_kernels() {
  static constexpr auto kKernels = make_micro_kernels<acc_t, Avx2<acc_t>>("AVX2");
  return kKernels;
}

template <typename half_t>
const WidenedKernels<half_t>& avx2_widened_kernels() {
  return widened_kernels_of<half_t, Avx2<float>, Order::kChain>();
}

template const MicroKernels<float>& avx2_micro_kernels<float>();
template const MicroKernels<double>& avx2_micro_kernels<double>();
template const WidenedKernels<c10::Half>& avx2_widened_kernels<c10::Half>();
template const WidenedKernels<c10::BFloat16>& avx2_widened_kernels<c10::BFloat16>();

}  // namespace moe_ext::cpu
#endif
