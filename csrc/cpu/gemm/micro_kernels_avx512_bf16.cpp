// AVX512-BF16.
#if defined(__x86_64__)
#include "../vectorize.h"

#define MOE_EXT_TARGET MOE_EXT_TARGET_AVX512_BF16
#include "avx512_bf16.h"
#include "micro_kernel_loops.h"
#include "pair_panels.h"
#include "unpack_kernels.h"

namespace moe_ext::cpu {

const CodeKernels& avx512_bf16_code_kernels(const PackedFormat& format) {
  using Table = Panel<Avx512Bf16, Codes::kTable, /*has_minima=*/false>;
  static constexpr CodeKernels kPowers = code_kernels_of<Table, PowerPanel<Avx512Bf16>>();
  if (format.scales == Scales::kE8M0) return kPowers;
  return code_kernels_of<Avx512Bf16>(format);
}

const MicroKernels<float>& avx512_bf16_micro_kernels() {
  static constexpr auto kKernels = make_micro_kernels<float, Avx512Bf16>("AVX512-BF16");
  return kKernels;
}

}  // namespace moe_ext::cpu
#endif
