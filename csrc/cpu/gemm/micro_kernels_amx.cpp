// AMX: four tile registers of 16 by 16 numbers hold a tile of C. The other four hold K-groups of 16
// rows of A or of 16 columns of B.
#if defined(__x86_64__)
#include <immintrin.h>

#include "../vectorize.h"

#define MOE_EXT_TARGET MOE_EXT_TARGET_AMX
#include "avx512_bf16.h"
#include "micro_kernel_loops.h"

namespace moe_ext::cpu {
namespace {

constexpr int kMaxRows = 32;
constexpr int64_t kSide = 16;

// Palette 1: every tile register has 16 rows of 64 bytes.
struct alignas(64) Configuration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

MOE_EXT_TARGET void begin() {
  static const Configuration configuration;
  _tile_loadconfig(&configuration);
}

MOE_EXT_TARGET void end() { _tile_release(); }

// A GemmKernel.
template <int kRows, int kVectors>
MOE_EXT_TARGET void amx_gemm_kernel(int64_t num_groups, const float* a, const float* b, int64_t ldb,
                                    const Tile<float>& tile, const Prefetch& prefetch,
                                    float* /*packed*/) {
  constexpr bool kTwoRows = kRows > kSide, kTwoColumns = kVectors > 1;
  constexpr int64_t kBytesA = 4 * kSide;
  const int64_t bytes_b = 4 * ldb;
  const int64_t step = int64_t{1} << prefetch.shift_groups;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t q = 0; q < num_groups; q += kSide) {
    for (int64_t i = q; prefetch.stride != 0 && i < q + kSide; i += step) {
      fetch<4 * kMaxTileVectors * kSide>(prefetch, i);
    }
    _tile_loadd(4, a + q * kMaxRows, kBytesA);
    _tile_loadd(6, b + q * ldb, bytes_b);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwoColumns) {
      _tile_loadd(7, b + q * ldb + kSide, bytes_b);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTwoRows) {
      _tile_loadd(5, a + q * kMaxRows + kSide * kSide, kBytesA);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kTwoColumns) _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float sum[kMaxRows][kMaxTileVectors * kSide];
  constexpr int64_t kBytes = sizeof(sum[0]);
  _tile_stored(0, sum[0], kBytes);
  if constexpr (kTwoColumns) _tile_stored(1, sum[0] + kSide, kBytes);
  if constexpr (kTwoRows) _tile_stored(2, sum[kSide], kBytes);
  if constexpr (kTwoRows && kTwoColumns) _tile_stored(3, sum[kSide] + kSide, kBytes);
  const bool rounds = kTwoColumns && tile.rounded != nullptr;
  for (int r = 0; r < kRows; ++r) {
    float* row = rounds ? sum[r] : tile.c + r * tile.ldc;
    const float* add = tile.add == nullptr ? nullptr : tile.add + r * tile.ld_add;
    for (int i = 0; i < kVectors * kSide; ++i) {
      row[i] = add == nullptr ? sum[r][i] : add[i] + sum[r][i];
    }
  }
  if (!rounds) return;
  for (int r = 0; r < kRows; ++r) {
    const auto* row = reinterpret_cast<const Avx512Bf16::Aligned*>(sum[r]);
    Avx512Bf16::store_rounded(row, tile.non_temporal, tile.rounded + r * tile.ldc);
  }
}

template <int... kRow>
constexpr MicroKernels<float> make_amx_micro_kernels(std::integer_sequence<int, kRow...>) {
  MicroKernels<float> kernels{.name = "AMX",
                              .pairs = true,
                              .a_in_row_blocks = true,
                              .sums_apart = true,
                              .rounds = true,
                              .group_multiple = kSide,
                              .max_rows = kMaxRows,
                              .a_panel_width = kMaxRows,
                              .lanes = kSide,
                              .begin = begin,
                              .end = end};
  ((kernels.gemm[0][kRow] = amx_gemm_kernel<kRow + 1, 1>), ...);
  ((kernels.gemm[1][kRow] = amx_gemm_kernel<kRow + 1, 2>), ...);
  return kernels;
}

}  // namespace

const MicroKernels<float>& amx_micro_kernels() {
  static constexpr auto kKernels =
      make_amx_micro_kernels(std::make_integer_sequence<int, kMaxRows>());
  return kKernels;
}

}  // namespace moe_ext::cpu
#endif
