// AVX512-BF16 with the table lookups of AVX512-VBMI, which Cooper Lake does not have.
#if defined(__x86_64__)
#include "../vectorize.h"

#define MOE_EXT_TARGET MOE_EXT_TARGET_AVX512_VBMI
#include "avx512_bf16.h"
#include "pair_panels.h"
#include "unpack_kernels.h"

namespace moe_ext::cpu {

const CodeKernels& avx512_vbmi_code_kernels_of_e4m3() {
  using Bytes = Panel<Avx512Bf16, Codes::kE4M3, /*has_minima=*/false>;
  static constexpr CodeKernels kKernels = code_kernels_of<Bytes, BytePanel<Avx512Bf16>>();
  return kKernels;
}

}  // namespace moe_ext::cpu
#endif
