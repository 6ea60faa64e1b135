// The loops of the kernels for few rows of A and a B in half precision, whose numbers they convert
// to floats. A micro-kernel file of x86-64 includes this header after micro_kernel_loops.h.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "../vectorize.h"
#include "micro_kernel_loops.h"
#include "simd.h"

namespace moe_ext::cpu {
namespace {

// The order of the sums. kChain: one chain of multiply-adds along K. kAmx: the order of the
// instruction tdpbf16ps. For each 32 numbers along K, it has one chain for the even numbers and one
// for the odd ones. Both start at 0, and their sum is added to C. The multiply-adds are fused,
// round to nearest, and treat subnormal numbers as 0, as those of these loops do (subnormals.h).
enum class Order { kChain, kAmx };

template <typename half_t, int kBytes>
struct Widened {
  using Aligned = typename Vector<float, kBytes>::Aligned;
  typedef uint32_t Bits __attribute__((vector_size(kBytes)));
  static constexpr bool kBFloat16 = std::is_same_v<half_t, c10::BFloat16>;

  // Converts a vector of numbers.
  MOE_EXT_TARGET MOE_EXT_KERNEL void load(const half_t* from, Aligned& to) {
    if constexpr (kBytes == 64) {
      const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      if constexpr (kBFloat16) {
        to = (Aligned)((Bits)_mm512_maskz_cvtepu16_epi32(0xffff, halves) << 16);
      } else {
        to = (Aligned)_mm512_maskz_cvtph_ps(0xffff, halves);
      }
    } else {
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      if constexpr (kBFloat16) {
        to = (Aligned)((Bits)_mm256_cvtepu16_epi32(halves) << 16);
      } else {
        to = (Aligned)_mm256_cvtph_ps(halves);
      }
    }
  }

  // Converts the two numbers in each lane.
  MOE_EXT_TARGET MOE_EXT_KERNEL void split(const Aligned& pairs, Aligned& even, Aligned& odd) {
    const Bits high = (Bits)pairs >> 16;
    if constexpr (kBFloat16) {
      even = (Aligned)((Bits)pairs << 16);
      odd = (Aligned)((Bits)pairs & 0xffff0000);
    } else if constexpr (kBytes == 64) {
      even = convert(_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)pairs));
      odd = convert(_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)high));
    } else {
      const Bits low = (Bits)pairs & 0xffff;
      const __m256i halves =
          _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)low, (__m256i)high), 0xd8);
      even = (Aligned)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
      odd = (Aligned)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    }
  }

 private:
  MOE_EXT_TARGET MOE_EXT_KERNEL Aligned convert(const __m256i& halves) {
    return (Aligned)_mm512_maskz_cvtph_ps(0xffff, halves);
  }
};

// A WidenedAxpyf.
template <typename half_t, typename Simd, Order order, int kRows>
MOE_EXT_TARGET void widened_axpyf(const float* a, const half_t* b, int64_t ldb, int64_t num_columns,
                                  const half_t* prefetch_b, bool starts, float* c, int64_t ldc) {
  using Aligned = typename Vector<float, Simd::kBytes>::Aligned;
  using Unaligned = typename Vector<float, Simd::kBytes>::Unaligned;
  constexpr int kLanes = Simd::kBytes / sizeof(float);
  constexpr int kChains = order == Order::kAmx ? 2 : 1;
  // As many columns of a cache line of B as there are registers for the sums.
  constexpr int kMaxSums = Simd::kBytes == 64 ? 24 : 12, kMost = kMaxSums / (kRows * kChains);
  constexpr int kInLine = 64 / sizeof(half_t) / kLanes;
  constexpr int kVectors = kMost >= 4 && kInLine == 4 ? 4 : kMost >= 2 ? 2 : 1;
  for (int64_t j = 0; j < num_columns; j += kVectors * kLanes) {
    Aligned sum[kChains][kRows][kVectors] = {};
    if (order == Order::kChain && !starts) {
      MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
        MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
          sum[0][r][v] = *reinterpret_cast<const Unaligned*>(c + r * ldc + j + v * kLanes);
        }
      }
    }
    const half_t* row = b + j;
    const half_t* ahead = prefetch_b + j;
    const float* numbers = a;
    for (int64_t p = 0; p < kWidenedDepth; p += 2) {
      MOE_EXT_UNROLL for (int odd = 0; odd < 2; ++odd) {
        Aligned columns[kVectors];
        __builtin_prefetch(ahead, 0, 2);
        MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
          Widened<half_t, Simd::kBytes>::load(row + v * kLanes, columns[v]);
        }
        MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
          MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
            Simd::multiply_add(numbers[r], columns[v], sum[odd % kChains][r][v]);
          }
        }
        row += ldb;
        ahead += ldb;
        numbers += kRows;
      }
    }
    MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
      MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
        auto& to = *reinterpret_cast<Unaligned*>(c + r * ldc + j + v * kLanes);
        if constexpr (order == Order::kAmx) {
          to = (starts ? Aligned{} : Aligned(to)) + (sum[0][r][v] + sum[1][r][v]);
        } else {
          to = sum[0][r][v];
        }
      }
    }
  }
}

// A WidenedDotxf. Transposes pairs of numbers as dotxf_kernel transposes floats.
template <typename half_t, typename Simd, Order order, int kRows>
MOE_EXT_TARGET void widened_dotxf(int64_t depth, const float* a, const half_t* b, int64_t ldb,
                                  const half_t* prefetch_b, bool starts, float* c, int64_t ldc) {
  using Aligned = typename Vector<float, Simd::kBytes>::Aligned;
  using Unaligned = typename Vector<float, Simd::kBytes>::Unaligned;
  constexpr int kLanes = Simd::kBytes / sizeof(float), kSquare = 4;
  constexpr int kChains = order == Order::kAmx ? 2 : 1;
  static_assert(order == Order::kChain || 2 * kLanes == kWidenedDepth);
  const auto* pairs = reinterpret_cast<const float*>(b);
  const auto* ahead = reinterpret_cast<const float*>(prefetch_b);
  Aligned sum[kRows] = {};
  for (int64_t p = 0; p < depth; p += 2 * kLanes, pairs += kLanes, ahead += kLanes) {
    Aligned block[kLanes / kSquare][kSquare];
    load_block<float, Simd::kBytes>(pairs, ldb / 2, ahead, block);
    Aligned chains[kChains][kRows] = {};
    auto& even = order == Order::kAmx ? chains[0] : sum;
    auto& odd = order == Order::kAmx ? chains[kChains - 1] : sum;
    MOE_EXT_UNROLL for (int s = 0; s < kLanes / kSquare; ++s) {
      MOE_EXT_UNROLL for (int q = 0; q < kSquare; ++q) {
        Aligned first, second;
        Widened<half_t, Simd::kBytes>::split(block[s][q], first, second);
        const float* numbers = a + (p + 2 * (s * kSquare + q)) * kRows;
        MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
          Simd::multiply_add(numbers[r], first, even[r]);
        }
        MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
          Simd::multiply_add(numbers[kRows + r], second, odd[r]);
        }
      }
    }
    if constexpr (order == Order::kAmx) {
      MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) sum[r] = sum[r] + (even[r] + odd[r]);
    }
  }
  MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
    auto& to = *reinterpret_cast<Unaligned*>(c + r * ldc);
    to = starts ? sum[r] : Aligned(to) + sum[r];
  }
}

template <typename half_t, typename Simd, Order order, int... kRow>
constexpr WidenedKernels<half_t> make_widened_kernels(std::integer_sequence<int, kRow...>) {
  WidenedKernels<half_t> kernels{.rounds_a = order == Order::kAmx};
  ((kernels.axpyf[kRow] = widened_axpyf<half_t, Simd, order, kRow + 1>), ...);
  ((kernels.dotxf[kRow] = widened_dotxf<half_t, Simd, order, kRow + 1>), ...);
  return kernels;
}

template <typename half_t, typename Simd, Order order>
const WidenedKernels<half_t>& widened_kernels_of() {
  static constexpr auto kKernels =
      make_widened_kernels<half_t, Simd, order>(std::make_integer_sequence<int, kMaxFewRows>());
  return kKernels;
}

}  // namespace
}  // namespace moe_ext::cpu
