// The loops of the micro-kernels. The source file of each instruction set includes this header
// after it has defined MOE_EXT_TARGET; simd.h describes `Simd`.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../vectorize.h"
#include "micro_kernels.h"
#include "packing.h"
#include "prefetch_ahead.h"
#include "simd.h"

namespace moe_ext::cpu {
namespace {

// Prefetches the chunk of kBytes that belongs to K-group q.
template <int kBytes>
MOE_EXT_KERNEL void fetch(const Prefetch& prefetch, int64_t q) {
  const int64_t n = prefetch.first + (q >> prefetch.shift_groups);
  const char* chunk = prefetch.data + (n & prefetch.row_mask) * prefetch.stride +
                      (n >> prefetch.shift_rows) * kBytes;
  MOE_EXT_UNROLL for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(chunk + i, 0, 2);
}

// Where lines are prefetched in steps of some bytes, in ascending order: prefetches a line far
// behind `next` if a page begins in this step.
template <typename acc_t>
MOE_EXT_KERNEL void prefetch_page(const acc_t* next, uintptr_t step) {
  if (reinterpret_cast<uintptr_t>(next) % kPageBytes < step) {
    __builtin_prefetch(reinterpret_cast<const char*>(next) + kPagesAhead, /*rw=*/0, /*locality=*/2);
  }
}

// The loop of gemm_kernel. The tile stays in kRows * kVectors registers.
template <typename acc_t, typename Simd, int kRows, int kVectors>
MOE_EXT_TARGET MOE_EXT_KERNEL void gemm_loop(int64_t num_groups, const acc_t* __restrict a,
                                             const acc_t* __restrict b, int64_t ldb,
                                             const Tile<acc_t>& tile, const Prefetch& prefetch,
                                             acc_t* __restrict packed) {
  using Aligned = typename Vector<acc_t, Simd::kBytes>::Aligned;
  using Unaligned = typename Vector<acc_t, Simd::kBytes>::Unaligned;
  constexpr int kLanes = Simd::kBytes / sizeof(acc_t);
  constexpr int kPanelBytes = kMaxTileVectors * Simd::kBytes;
  Aligned sum[kRows][kVectors] = {};
  // The rows that the kernel reads or writes at the end.
  const acc_t* needed = tile.c;
  int64_t ld_needed = tile.ldc;
  if (tile.add != nullptr) {
    needed = tile.add;
    ld_needed = tile.ld_add;
  } else if (tile.non_temporal || tile.rounded != nullptr) {
    needed = b;
    ld_needed = 0;
  }
  const Prefetch later = prefetch;  // a copy in registers
  [[maybe_unused]] const auto run = [&](auto packs) __attribute__((always_inline)) MOE_EXT_TARGET {
    const auto group = [&](int64_t q) __attribute__((always_inline)) MOE_EXT_TARGET {
      __builtin_prefetch(a + 16 * Simd::kAPanelWidth);
      MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
        __builtin_prefetch(b + 4 * ldb + v * kLanes);
      }
      Aligned column[kVectors];
      MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
        column[v] = *reinterpret_cast<const Unaligned*>(b + v * kLanes);
        if constexpr (packs()) {
          *reinterpret_cast<Aligned*>(packed + (q * kMaxTileVectors + v) * kLanes) = column[v];
        }
      }
      MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
        MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
          Simd::multiply_add(a[r], column[v], sum[r][v]);
        }
      }
      a += Simd::kAPanelWidth;
      b += ldb;
    };
    // Two K-groups at a time; with shift_groups > 0 both prefetch the same chunk, so one prefetch
    // suffices.
    int64_t q = 0;
    for (; q + 1 < num_groups; q += 2) {
      fetch<kPanelBytes>(later, q);
      group(q);
      if (later.shift_groups == 0) fetch<kPanelBytes>(later, q + 1);
      // One cache line every 8 K-groups: more prefetches would delay the loads of a and b.
      __builtin_prefetch(needed + q / 16 * ld_needed + (q & 8) * (64 / sizeof(acc_t)) / 8, 1);
      group(q + 1);
    }
    if (q < num_groups) group(q);
  };
  if constexpr (requires { Simd::add_groups(num_groups, a, b, ldb, packed, sum); }) {
    Simd::add_groups(num_groups, a, b, ldb, packed, sum);
  } else {
    packed != nullptr ? run(std::true_type()) : run(std::false_type());
  }
  if (tile.add != nullptr) {
    MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
      MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
        const acc_t* add = tile.add + r * tile.ld_add + v * kLanes;
        sum[r][v] = *reinterpret_cast<const Unaligned*>(add) + sum[r][v];
      }
    }
  }
  if constexpr (Simd::kPairs && kVectors == kMaxTileVectors) {
    if (tile.rounded != nullptr) {
      MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
        Simd::store_rounded(sum[r], tile.non_temporal, tile.rounded + r * tile.ldc);
      }
      return;
    }
  }
  if constexpr (requires { Simd::stream(tile.c, sum[0][0]); }) {
    if (tile.non_temporal &&
        (reinterpret_cast<uintptr_t>(tile.c) | tile.ldc * sizeof(acc_t)) % Simd::kBytes == 0) {
      MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
        MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
          Simd::stream(tile.c + r * tile.ldc + v * kLanes, sum[r][v]);
        }
      }
      return;
    }
  }
  MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
    MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
      *reinterpret_cast<Unaligned*>(tile.c + r * tile.ldc + v * kLanes) = sum[r][v];
    }
  }
}

// A GemmKernel. gcc 12 needs up to 2% fewer instructions if it inlines the loop here.
template <typename acc_t, typename Simd, int kRows, int kVectors>
MOE_EXT_TARGET __attribute__((noinline)) void gemm_kernel(int64_t num_groups, const acc_t* a,
                                                          const acc_t* b, int64_t ldb,
                                                          const Tile<acc_t>& tile,
                                                          const Prefetch& prefetch, acc_t* packed) {
  gemm_loop<acc_t, Simd, kRows, kVectors>(num_groups, a, b, ldb, tile, prefetch, packed);
}

// Adds kDepth K-groups of rows of B, multiplied by K-groups of A, to C. The K-groups of A stay in
// the first cache level.
template <typename acc_t, typename Simd, int kRows, int kDepth>
MOE_EXT_TARGET MOE_EXT_KERNEL void axpyf_rows(const acc_t* __restrict a, const acc_t* __restrict b,
                                              int64_t ldb, int64_t num_columns,
                                              const acc_t* prefetch_b, bool starts,
                                              acc_t* __restrict c, int64_t ldc) {
  using Aligned = typename Vector<acc_t, Simd::kBytes>::Aligned;
  using Unaligned = typename Vector<acc_t, Simd::kBytes>::Unaligned;
  using Groups = GroupsOf<Simd::kPairs, Simd::kBytes, acc_t>;
  constexpr int kLanes = Simd::kBytes / sizeof(acc_t);
  constexpr int kNumbers = Groups::kNumbers;
  const int64_t width = num_columns / kNumbers;  // of a row of B, in elements of type acc_t
  int64_t left = width;                          // elements left in the prefetched row
  for (int64_t j = 0; j < width; j += kLanes) {
    Aligned group[kDepth][kNumbers];
    MOE_EXT_UNROLL for (int q = 0; q < kDepth; ++q) {
      MOE_EXT_UNROLL for (int i = 0; i < kNumbers; ++i) {
        __builtin_prefetch(prefetch_b + (q * kNumbers + i) * kLanes, 0, 2);
        group[q][i] = *reinterpret_cast<const Unaligned*>(b + (q * kNumbers + i) * ldb + j);
      }
      Groups::join_rows(group[q]);
    }
    prefetch_page(prefetch_b, kDepth * kNumbers * Simd::kBytes);
    prefetch_b += kDepth * kNumbers * kLanes;
    left -= kDepth * kNumbers * kLanes;
    if (left <= 0) {
      left += width;
      prefetch_b += ldb - width;
    }
    MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
      MOE_EXT_UNROLL for (int i = 0; i < kNumbers; ++i) {
        auto& to = *reinterpret_cast<Unaligned*>(c + r * ldc + j * kNumbers + i * kLanes);
        Aligned sum = starts ? Aligned{} : Aligned(to);
        MOE_EXT_UNROLL for (int q = 0; q < kDepth; ++q) {
          Simd::multiply_add(a[q * Simd::kAPanelWidth + r], group[q][i], sum);
        }
        to = sum;
      }
    }
  }
}

// An AxpyfKernel. With several K-groups at a time, C is read and written less often.
template <typename acc_t, typename Simd, int kRows>
MOE_EXT_TARGET void axpyf_kernel(int64_t num_groups, const acc_t* a, const acc_t* b, int64_t ldb,
                                 int64_t num_columns, const acc_t* prefetch_b, bool starts,
                                 acc_t* c, int64_t ldc) {
  constexpr int kNumbers = Simd::kPairs ? 2 : 1;
  constexpr int kDepth = 4;
  int64_t q = 0;
  const auto add = [&](auto depth) __attribute__((always_inline)) MOE_EXT_TARGET {
    const int64_t first_row = q * kNumbers;
    axpyf_rows<acc_t, Simd, kRows, depth()>(a + q * Simd::kAPanelWidth, b + first_row * ldb, ldb,
                                            num_columns, prefetch_b + first_row * ldb,
                                            starts && q == 0, c, ldc);
    q += depth();
  };
  while (q + kDepth <= num_groups) add(std::integral_constant<int, kDepth>());
  while (q < num_groups) add(std::integral_constant<int, 1>());
}

// Loads a vector of pieces of 16 bytes, one from each of some rows.
template <typename acc_t, int kBytes>
MOE_EXT_TARGET MOE_EXT_KERNEL void load_pieces(const acc_t* row, int64_t stride,
                                               typename Vector<acc_t, kBytes>::Aligned& to) {
  if constexpr (kBytes == 16) {
    std::memcpy(&to, row, kBytes);
  } else {
#if defined(__x86_64__)
    using To = typename Vector<acc_t, kBytes>::Aligned;
    // With shuffles of the compiler instead, gcc 12 does not join the halves while it loads them.
    typename Vector<acc_t, kBytes / 2>::Aligned low, high;
    load_pieces<acc_t, kBytes / 2>(row, stride, low);
    load_pieces<acc_t, kBytes / 2>(row + kBytes / 32 * stride, stride, high);
    if constexpr (kBytes == 32) {
      to = (To)_mm256_insertf128_ps(_mm256_castps128_ps256((__m128)low), (__m128)high, 1);
    } else {
      to = (To)_mm512_insertf32x8(_mm512_castps256_ps512((__m256)low), (__m256)high, 1);
    }
#endif
  }
}

// Loads a block of B, whose columns are contiguous: as many columns as a vector has lanes, with one
// cache line, or a part of one, of each column. Transposes it in registers: block[s][q] is K-group
// s * kSquare + q of every column. Prefetches the block at `ahead`, whose columns are ldb apart
// too: in this order, the addresses of the pages of all columns are translated at once.
template <typename acc_t, int kBytes, int kSquares, int kSquare>
MOE_EXT_TARGET MOE_EXT_KERNEL void load_block(
    const acc_t* row, int64_t ldb, const acc_t* ahead,
    typename Vector<acc_t, kBytes>::Aligned (&block)[kSquares][kSquare]) {
  MOE_EXT_UNROLL for (int i = 0; i < kSquare; ++i, row += ldb, ahead += ldb) {
    // Otherwise gcc 12 holds a pointer to every column, and they spill.
    asm("" : "+r"(row), "+r"(ahead));
    MOE_EXT_UNROLL for (int s = 0; s < kSquares; ++s) {
      __builtin_prefetch(ahead + s * kSquare * ldb, 0, 2);
      load_pieces<acc_t, kBytes>(row + s * kSquare, kSquare * ldb, block[s][i]);
    }
  }
  MOE_EXT_UNROLL for (int s = 0; s < kSquares; ++s) {
    Groups<kBytes, acc_t>::template transpose<kSquare>(block[s]);
  }
}

// A DotxfKernel.
template <typename acc_t, typename Simd, int kRows>
MOE_EXT_TARGET void dotxf_kernel(int64_t depth, const acc_t* a, int64_t lda, const acc_t* b,
                                 int64_t ldb, const acc_t* prefetch_b, bool starts, acc_t* c,
                                 int64_t ldc) {
  using Aligned = typename Vector<acc_t, Simd::kBytes>::Aligned;
  using Unaligned = typename Vector<acc_t, Simd::kBytes>::Unaligned;
  constexpr int kLanes = Simd::kBytes / sizeof(acc_t);
  constexpr int kSquare = 16 / sizeof(acc_t), kSquares = kLanes / kSquare;  // of 16 bytes
  Aligned sum[kRows] = {};
  for (int64_t p = 0; p < depth; p += kLanes) {
    Aligned block[kSquares][kSquare];
    load_block<acc_t, Simd::kBytes>(b + p, ldb, prefetch_b + p, block);
    MOE_EXT_UNROLL for (int s = 0; s < kSquares; ++s) {
      MOE_EXT_UNROLL for (int q = 0; q < kSquare; ++q) {
        MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
          multiply_add_once<Simd>(a[r * lda + p + s * kSquare + q], block[s][q], sum[r]);
        }
      }
    }
  }
  MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
    auto& to = *reinterpret_cast<Unaligned*>(c + r * ldc);
    to = starts ? sum[r] : Aligned(to) + sum[r];
  }
}

template <typename acc_t, typename Simd, int kVectors, int... kRow>
constexpr void fill_gemm(MicroKernels<acc_t>& kernels, std::integer_sequence<int, kRow...>) {
  ((kernels.gemm[kVectors - 1][kRow] = gemm_kernel<acc_t, Simd, kRow + 1, kVectors>), ...);
}

template <typename acc_t, typename Simd, int... kRow>
constexpr void fill_few_rows(MicroKernels<acc_t>& kernels, std::integer_sequence<int, kRow...>) {
  ((kernels.axpyf[kRow] = axpyf_kernel<acc_t, Simd, kRow + 1>), ...);
  ((kernels.dotxf[kRow] = dotxf_kernel<acc_t, Simd, kRow + 1>), ...);
}

// Returns the micro-kernels of an instruction set, with tiles of up to Simd::kMaxRows rows.
template <typename acc_t, typename Simd>
constexpr MicroKernels<acc_t> make_micro_kernels(const char* name) {
  MicroKernels<acc_t> kernels{.name = name,
                              .pairs = Simd::kPairs,
                              .rounds = Simd::kPairs,
                              .max_rows = Simd::kMaxRows,
                              .a_panel_width = Simd::kAPanelWidth,
                              .lanes = Simd::kBytes / sizeof(acc_t)};
  constexpr auto kTileRows = std::make_integer_sequence<int, Simd::kMaxRows>();
  fill_gemm<acc_t, Simd, 1>(kernels, kTileRows);
  fill_gemm<acc_t, Simd, 2>(kernels, kTileRows);
  fill_few_rows<acc_t, Simd>(kernels, std::make_integer_sequence<int, kMaxFewRows>());
  return kernels;
}

}  // namespace
}  // namespace moe_ext::cpu
