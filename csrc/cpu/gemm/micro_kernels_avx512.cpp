// AVX-512.
#if defined(__x86_64__)
#include "../vectorize.h"

#define MOE_EXT_TARGET MOE_EXT_TARGET_AVX512
#include "avx512.h"
#include "micro_kernel_loops.h"
#include "unpack_kernels.h"
#include "widened_loops.h"

namespace moe_ext::cpu {

const CodeKernels& avx512_code_kernels(const PackedFormat& format) {
  return code_kernels_of<Avx512<float>>(format);
}

template <typename acc_t>
const MicroKernels<acc_t>& avx512_micro_kernels() {
  static constexpr auto kKernels = make_micro_kernels<acc_t, Avx512<acc_t>>("AVX-512");
  return kKernels;
}

template <typename half_t>
const WidenedKernels<half_t>& avx512_widened_kernels() {
  return widened_kernels_of<half_t, Avx512<float>, Order::kChain>();
}

// AMX machines have AVX-512; these kernels are for few rows, which AMX would multiply slowly.
const WidenedKernels<c10::BFloat16>& amx_widened_kernels() {
  return widened_kernels_of<c10::BFloat16, Avx512<float>, Order::kAmx>();
}

template const MicroKernels<float>& avx512_micro_kernels<float>();
template const MicroKernels<double>& avx512_micro_kernels<double>();
template const WidenedKernels<c10::Half>& avx512_widened_kernels<c10::Half>();
template const WidenedKernels<c10::BFloat16>& avx512_widened_kernels<c10::BFloat16>();

}  // namespace moe_ext::cpu
#endif
