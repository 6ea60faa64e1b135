#include "micro_kernels.h"

#include <algorithm>
#include <array>
#include <type_traits>

#include "../../kernels/machine.h"
#include "../../kernels/types.h"
#include "../vectorize.h"
#include "kernel_table.h"
#include "unpacking.h"

namespace moe_ext::cpu {

namespace {

template <typename scalar_t>
constexpr Types kTypeOf = std::is_same_v<scalar_t, double>          ? kFloat64
                          : std::is_same_v<scalar_t, float>         ? kFloat32
                          : std::is_same_v<scalar_t, c10::BFloat16> ? kBFloat16
                                                                    : kFloat16;

// Returns the instruction set of the GEMMs of a type.
template <typename scalar_t>
Isa isa_of() {
  static const Isa isa_of_type = gemm_rule(isa(), kTypeOf<scalar_t>, kAnyRows, Layout::kAny).isa;
  return isa_of_type;
}

}  // namespace

template <typename scalar_t, typename acc_t>
const MicroKernels<acc_t>& micro_kernels() {
  const Isa isa = isa_of<scalar_t>();
#if defined(__x86_64__)
  if constexpr (std::is_same_v<scalar_t, c10::BFloat16>) {
    if (isa == Isa::kAmx) return amx_micro_kernels();
    if (isa == Isa::kAvx512Bf16) return avx512_bf16_micro_kernels();
  }
  if (isa == Isa::kAvx512) return avx512_micro_kernels<acc_t>();
  if (isa == Isa::kAvx2) return avx2_micro_kernels<acc_t>();
#elif defined(__aarch64__)
  if constexpr (std::is_same_v<scalar_t, c10::BFloat16>) {
    if (isa == Isa::kNeonBf16) return neon_bf16_micro_kernels();
  }
  if (isa == Isa::kNeon) return neon_micro_kernels<acc_t>();
#endif
  return portable_micro_kernels<acc_t>();
}

template <typename half_t>
const WidenedKernels<half_t>* widened_kernels() {
#if defined(__x86_64__)
  const Isa isa = isa_of<half_t>();
  if constexpr (std::is_same_v<half_t, c10::BFloat16>) {
    if (isa == Isa::kAmx) return &amx_widened_kernels();
  }
  if (isa == Isa::kAvx512) return &avx512_widened_kernels<half_t>();
  if (isa == Isa::kAvx2) return &avx2_widened_kernels<half_t>();
#endif
  return nullptr;
}

template <typename scalar_t>
Reading reading_of(int64_t rows, Layout layout) {
  // gemm_rule searches the table, and a GEMM with one row may take less than a microsecond.
  static const auto table = [] {
    std::array<std::array<Reading, kMaxFewRows + 1>, 2> readings;
    for (const Layout layout : {Layout::kAlongN, Layout::kAlongK}) {
      for (int64_t rows = 1; rows <= kMaxFewRows + 1; ++rows) {
        readings[layout == Layout::kAlongK][rows - 1] =
            gemm_rule(isa(), kTypeOf<scalar_t>, rows, layout).reading;
      }
    }
    return readings;
  }();
  return table[layout == Layout::kAlongK][std::min<int64_t>(rows - 1, kMaxFewRows)];
}

template <typename scalar_t>
CodeKernels code_kernels(const PackedFormat& format) {
  constexpr bool kHalf = sizeof(scalar_t) == 2;
#if defined(__x86_64__)
  constexpr bool kBFloat16 = std::is_same_v<scalar_t, c10::BFloat16>;
  const Isa isa = isa_of<scalar_t>();
  if (kBFloat16 && (isa == Isa::kAmx || isa == Isa::kAvx512Bf16)) {
    const bool vbmi = format.codes == Codes::kE4M3 && __builtin_cpu_supports("avx512vbmi");
    CodeKernels kernels =
        vbmi ? avx512_vbmi_code_kernels_of_e4m3() : avx512_bf16_code_kernels(format);
    if (isa == Isa::kAmx) kernels.few_rows = amx_few_rows_kernels(format);
    return kernels;
  }
  if constexpr (kHalf) {
    const bool rounds = !(kBFloat16 && are_bfloat16(format));
    if (rounds && isa == Isa::kAvx512) return avx512_rounded_code_kernels<scalar_t>(format);
    if (rounds && isa == Isa::kAvx2) return avx2_rounded_code_kernels<scalar_t>(format);
  }
  if (isa == Isa::kAvx512) return avx512_code_kernels(format);
  if (isa == Isa::kAvx2) return avx2_code_kernels(format);
#endif
  if constexpr (kHalf) {
    return portable_rounded_code_kernels<scalar_t>(format);
  } else {
    return portable_code_kernels(format);
  }
}

template const MicroKernels<float>& micro_kernels<float, float>();
template const MicroKernels<double>& micro_kernels<double, double>();
template const MicroKernels<float>& micro_kernels<c10::Half, float>();
template const MicroKernels<float>& micro_kernels<c10::BFloat16, float>();

template const WidenedKernels<c10::Half>* widened_kernels<c10::Half>();
template const WidenedKernels<c10::BFloat16>* widened_kernels<c10::BFloat16>();

template CodeKernels code_kernels<float>(const PackedFormat&);
template CodeKernels code_kernels<double>(const PackedFormat&);
template CodeKernels code_kernels<c10::Half>(const PackedFormat&);
template CodeKernels code_kernels<c10::BFloat16>(const PackedFormat&);

template Reading reading_of<float>(int64_t, Layout);
template Reading reading_of<double>(int64_t, Layout);
template Reading reading_of<c10::Half>(int64_t, Layout);
template Reading reading_of<c10::BFloat16>(int64_t, Layout);

ProductNames product_names() {
  return {.float64 = micro_kernels<double, double>().name,
          .float32 = micro_kernels<float, float>().name,
          .bfloat16 = micro_kernels<c10::BFloat16, float>().name,
          .float16 = micro_kernels<c10::Half, float>().name};
}

}  // namespace moe_ext::cpu
