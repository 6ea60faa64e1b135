#include "micro_kernels.h"

#include <utility>

#include "vectorize.h"

// Here, and only here, a product may be fused with the sum that it goes into.
#pragma GCC optimize("fp-contract=fast")

namespace moe_ext::cpu {
namespace {

template <typename acc_t, int kBytes>
struct Vector {
  typedef acc_t Aligned __attribute__((vector_size(kBytes)));
  typedef acc_t Unaligned __attribute__((vector_size(kBytes), aligned(sizeof(acc_t))));
};

// The sums stay in registers: kRows * kVectors of them.
template <typename acc_t, int kBytes, int kPanelStride, int kRows, int kVectors>
MOE_EXT_KERNEL void multiply(int64_t depth, const acc_t* __restrict a, const acc_t* __restrict b,
                             int64_t stride_b, acc_t* __restrict c, int64_t stride_c,
                             bool accumulate, const Prefetch& prefetch) {
  using Aligned = typename Vector<acc_t, kBytes>::Aligned;
  using Unaligned = typename Vector<acc_t, kBytes>::Unaligned;
  constexpr int kLanes = kBytes / sizeof(acc_t);
  constexpr int kWidth = kMaxTileVectors * kLanes;
  if (accumulate) {
    MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kVectors * kLanes; i += 64 / sizeof(acc_t))
        __builtin_prefetch(c + r * stride_c + i, 1);
    }
  }
  const auto [data, row, chunk] = prefetch;
  Aligned sum[kRows][kVectors] = {};
  for (int64_t p = 0; p < depth; ++p, a += kPanelStride, b += stride_b) {
    const char* line = data + p % kWidth * row + p / kWidth * chunk;
    MOE_EXT_UNROLL for (int i = 0; i < kMaxTileVectors * kBytes; i += 64) {
      __builtin_prefetch(line + i, 0, 2);
    }
    __builtin_prefetch(a + 16 * kPanelStride);
    Aligned column[kVectors];
    MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
      column[v] = *reinterpret_cast<const Unaligned*>(b + v * kLanes);
    }
    MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
      MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) sum[r][v] += a[r] * column[v];
    }
  }
  MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
    MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
      Unaligned& out = *reinterpret_cast<Unaligned*>(c + r * stride_c + v * kLanes);
      out = accumulate ? out + sum[r][v] : sum[r][v];
    }
  }
}

#define MOE_EXT_INSTRUCTION_SET(Name, kTarget, kBytes_, kRows_, kPanelStride_)                    \
  struct Name {                                                                                   \
    static constexpr int kBytes = kBytes_, kRows = kRows_, kPanelStride = kPanelStride_;          \
    template <typename acc_t, int kTileRows, int kVectors>                                        \
    static __attribute__((noinline, target(kTarget))) void tile(int64_t depth, const acc_t* a,    \
                                                                const acc_t* b, int64_t stride_b, \
                                                                acc_t* c, int64_t stride_c,       \
                                                                bool accumulate,                  \
                                                                const Prefetch& prefetch) {       \
      multiply<acc_t, kBytes, kPanelStride, kTileRows, kVectors>(depth, a, b, stride_b, c,        \
                                                                 stride_c, accumulate, prefetch); \
    }                                                                                             \
  }

// As many rows as leave registers for a vector of B and an element of A.
#if defined(__x86_64__)
MOE_EXT_INSTRUCTION_SET(Avx512, "arch=x86-64-v4,prefer-vector-width=512", 64, 14, 16);
MOE_EXT_INSTRUCTION_SET(Avx2, "arch=x86-64-v3", 32, 6, 8);
MOE_EXT_INSTRUCTION_SET(Default, "arch=x86-64", 16, 6, 8);
#endif

template <typename acc_t, typename Set, int kVectors, int... kRow>
constexpr void fill(Tile<acc_t>* tiles, std::integer_sequence<int, kRow...>) {
  ((tiles[kRow] = Set::template tile<acc_t, kRow + 1, kVectors>), ...);
}

template <typename acc_t, typename Set>
constexpr MicroKernels<acc_t> kernels_of(const char* name) {
  MicroKernels<acc_t> kernels{name, Set::kRows, Set::kPanelStride, Set::kBytes / sizeof(acc_t), {}};
  fill<acc_t, Set, 1>(kernels.tile[0], std::make_integer_sequence<int, Set::kRows>());
  fill<acc_t, Set, 2>(kernels.tile[1], std::make_integer_sequence<int, Set::kRows>());
  return kernels;
}

}  // namespace

template <typename acc_t>
const MicroKernels<acc_t>& micro_kernels() {
#if defined(__x86_64__)
  static constexpr auto kAvx512 = kernels_of<acc_t, Avx512>("AVX-512 FMA");
  static constexpr auto kAvx2 = kernels_of<acc_t, Avx2>("AVX2 FMA");
  if (isa() == Isa::kAvx512) return kAvx512;
  if (isa() == Isa::kAvx2) return kAvx2;
#endif
  static constexpr auto kDefault = kernels_of<acc_t, Default>("portable");
  return kDefault;
}

template const MicroKernels<float>& micro_kernels();
template const MicroKernels<double>& micro_kernels();

}  // namespace moe_ext::cpu
