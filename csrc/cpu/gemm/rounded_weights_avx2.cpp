// AVX2.
#if defined(__x86_64__)
#include "../vectorize.h"

#define MOE_EXT_TARGET MOE_EXT_TARGET_AVX2
#include "avx2.h"
#include "rounded_weights.h"
#include "unpack_kernels.h"

namespace moe_ext::cpu {

template <typename half_t>
const CodeKernels& avx2_rounded_code_kernels(const PackedFormat& format) {
  return code_kernels_of<RoundedWeights<Avx2<float>, half_t>>(format);
}

template const CodeKernels& avx2_rounded_code_kernels<c10::Half>(const PackedFormat&);
template const CodeKernels& avx2_rounded_code_kernels<c10::BFloat16>(const PackedFormat&);

}  // namespace moe_ext::cpu
#endif
