// AVX-512.
#if defined(__x86_64__)
#include "../vectorize.h"

#define MOE_EXT_TARGET MOE_EXT_TARGET_AVX512
#include "avx512.h"
#include "rounded_weights.h"
#include "unpack_kernels.h"

namespace moe_ext::cpu {

template <typename half_t>
const CodeKernels& avx512_rounded_code_kernels(const PackedFormat& format) {
  return code_kernels_of<RoundedWeights<Avx512<float>, half_t>>(format);
}

const FewRowsKernels& amx_few_rows_kernels(const PackedFormat& format) {
  using Simd = TwoChains<Avx512<float>>;
  static constexpr FewRowsKernels kOfPowers =
      few_rows_kernels_of<Panel<Simd, Codes::kTable, /*has_minima=*/false>>();
  if (are_bfloat16(format)) return kOfPowers;
  return *for_panel_of<RoundedWeights<Simd, c10::BFloat16>>(
      format, []<typename Panel>(std::type_identity<Panel>) {
        static constexpr FewRowsKernels kKernels = few_rows_kernels_of<Panel>();
        return &kKernels;
      });
}

template const CodeKernels& avx512_rounded_code_kernels<c10::Half>(const PackedFormat&);
template const CodeKernels& avx512_rounded_code_kernels<c10::BFloat16>(const PackedFormat&);

}  // namespace moe_ext::cpu
#endif
