// Vectors of 16 bytes, which every processor has.
#if defined(__x86_64__) && !defined(__clang__)
#pragma GCC optimize("O2")  // only processors without AVX2 run this; O3 compiles for twice as long
#endif

#define MOE_EXT_TARGET
#include "micro_kernel_loops.h"
#include "rounded_weights.h"
#include "unpack_kernels.h"

namespace moe_ext::cpu {
namespace {

template <typename acc_t>
struct Portable {
  static constexpr int kBytes = 16, kMaxRows = 6, kAPanelWidth = 8;
  static constexpr bool kPairs = false;
  using Aligned = typename Vector<acc_t, kBytes>::Aligned;

  // Not every processor has a fused multiply-add; each product is rounded first.
  MOE_EXT_KERNEL void multiply_add(const acc_t& a, const Aligned& b, Aligned& sum) { sum += a * b; }
};

}  // namespace

const CodeKernels& portable_code_kernels(const PackedFormat& format) {
  return code_kernels_of<Portable<float>>(format);
}

template <typename half_t>
const CodeKernels& portable_rounded_code_kernels(const PackedFormat& format) {
  using Simd = RoundedWeights<Portable<float>, half_t>;
  return *for_panel_of<Simd>(format, []<typename Panel>(std::type_identity<Panel>) {
    // Other instruction sets that use these kernels have other sums.
    static constexpr CodeKernels kKernels{.unpack = unpack_kernel<Panel, Unpacked::kFloats>};
    return &kKernels;
  });
}

template const CodeKernels& portable_rounded_code_kernels<c10::Half>(const PackedFormat&);
template const CodeKernels& portable_rounded_code_kernels<c10::BFloat16>(const PackedFormat&);

template <typename acc_t>
const MicroKernels<acc_t>& portable_micro_kernels() {
  static constexpr auto kKernels = make_micro_kernels<acc_t, Portable<acc_t>>("portable");
  return kKernels;
}

template const MicroKernels<float>& portable_micro_kernels<float>();
template const MicroKernels<double>& portable_micro_kernels<double>();

}  // namespace moe_ext::cpu
