#include "micro_kernels.h"

#include <type_traits>

#include "../../kernels/machine.h"
#include "../../kernels/types.h"
#include "../vectorize.h"
#include "unpacking.h"

namespace moe_ext::cpu {

template <typename scalar_t, typename acc_t>
const MicroKernels<acc_t>& micro_kernels() {
#if defined(__x86_64__)
  if constexpr (std::is_same_v<scalar_t, c10::BFloat16>) {
    if (isa() == Isa::kAmx) return amx_micro_kernels();
    if (isa() == Isa::kAvx512Bf16) return avx512_bf16_micro_kernels();
  }
  if (isa() >= Isa::kAvx512) return avx512_micro_kernels<acc_t>();
  if (isa() == Isa::kAvx2) return avx2_micro_kernels<acc_t>();
#elif defined(__aarch64__)
  if constexpr (std::is_same_v<scalar_t, c10::BFloat16>) {
    if (isa() == Isa::kNeonBf16) return neon_bf16_micro_kernels();
  }
  if (isa() >= Isa::kNeon) return neon_micro_kernels<acc_t>();
#endif
  return portable_micro_kernels<acc_t>();
}

const CodeKernels& code_kernels(const PackedFormat& format, [[maybe_unused]] bool pairs) {
#if defined(__x86_64__)
  if (pairs) return avx512_bf16_code_kernels(format);
  if (isa() >= Isa::kAvx512) return avx512_code_kernels(format);
  if (isa() == Isa::kAvx2) return avx2_code_kernels(format);
#endif
  return portable_code_kernels(format);
}

template const MicroKernels<float>& micro_kernels<float, float>();
template const MicroKernels<double>& micro_kernels<double, double>();
template const MicroKernels<float>& micro_kernels<c10::Half, float>();
template const MicroKernels<float>& micro_kernels<c10::BFloat16, float>();

ProductNames product_names() {
  return {.float64 = micro_kernels<double, double>().name,
          .float32 = micro_kernels<float, float>().name,
          .bfloat16 = micro_kernels<c10::BFloat16, float>().name,
          .float16 = micro_kernels<c10::Half, float>().name};
}

}  // namespace moe_ext::cpu
