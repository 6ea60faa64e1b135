// What the instruction sets of 64-bit Arm share: the loop over the K-groups of a tile. The
// source file includes this header after it has defined MOE_EXT_TARGET.
#pragma once

#include <arm_neon.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../vectorize.h"
#include "micro_kernels.h"
#include "simd.h"

// A hint for the next loop. Unrolled, it would take registers from the loop before it.
#if defined(__clang__)
#define MOE_EXT_NO_UNROLL _Pragma("clang loop unroll(disable)")
#else
#define MOE_EXT_NO_UNROLL _Pragma("GCC unroll 1")
#endif

namespace moe_ext::cpu {
namespace {

// A tile has 24 of the 32 registers, a K-group of A up to 3, and a K-group of B 2. `Multiply` adds
// to a vector of sums the product of a vector of B and one number of a vector of A:
// Multiply::add(a, lane, b, sum).
template <typename acc_t, typename Multiply>
struct NeonGroups {
  static constexpr int kBytes = 16, kMaxRows = 12, kAPanelWidth = 12;
  static constexpr int kLanes = kBytes / sizeof(acc_t);
  using Aligned = typename Vector<acc_t, kBytes>::Aligned;

  // Adds num_groups K-groups to the sums. If `packed` is not null, first copies B's K-groups there.
  //
  // The registers of A and B are fixed, because one instruction loads several of them. Every
  // instruction is volatile, so the compiler keeps their order: out of order, a K-group would be
  // copied to other registers. There is no prefetch; the panels are read in sequence.
  template <int kRows, int kVectors>
  MOE_EXT_TARGET MOE_EXT_KERNEL void add_groups(int64_t num_groups, const acc_t* a, const acc_t* b,
                                                int64_t ldb, acc_t* packed,
                                                Aligned (&sum)[kRows][kVectors]) {
    if (packed != nullptr) {
      for (int64_t q = 0; q < num_groups; ++q) {
        std::memcpy(packed + q * kPanelWidth, b + q * ldb, kVectors * kBytes);
      }
      b = packed;
      ldb = kPanelWidth;
    }
    const int64_t bytes_b = ldb * static_cast<int64_t>(sizeof(acc_t));
    constexpr int kUnrolled = 8;
    int64_t q = 0;
    for (; q + kUnrolled <= num_groups; q += kUnrolled) {
      MOE_EXT_UNROLL for (int i = 0; i < kUnrolled; ++i) add_group(a, b, bytes_b, sum);
    }
    MOE_EXT_NO_UNROLL for (; q < num_groups; ++q) add_group(a, b, bytes_b, sum);
  }

 private:
  static constexpr int kPanelWidth = kMaxTileVectors * kLanes;  // of B
  static constexpr int kRowsAtOnce = 3 * kLanes;  // the rows of A that one instruction loads

  template <int kRows, int kVectors>
  MOE_EXT_TARGET MOE_EXT_KERNEL void add_group(const acc_t*& a, const acc_t*& b, int64_t bytes_b,
                                               Aligned (&sum)[kRows][kVectors]) {
    register Aligned b_0 asm("v3");
    register Aligned b_1 asm("v4");
    if constexpr (kVectors == 1) {
      asm volatile("ld1 {v3.16b}, [%0], %2" : "+r"(b), "=w"(b_0) : "r"(bytes_b) : "memory");
      const Aligned column[] = {b_0};
      add_rows<0>(a, column, sum);
    } else {
      asm volatile("ld1 {v3.16b, v4.16b}, [%0], %3"
                   : "+r"(b), "=w"(b_0), "=w"(b_1)
                   : "r"(bytes_b)
                   : "memory");
      const Aligned column[] = {b_0, b_1};
      add_rows<0>(a, column, sum);
    }
  }

  // Adds the products of the rows from kFirst on.
  template <int kFirst, int kRows, int kVectors>
  MOE_EXT_TARGET MOE_EXT_KERNEL void add_rows(const acc_t*& a, const Aligned (&column)[kVectors],
                                              Aligned (&sum)[kRows][kVectors]) {
    constexpr int kNext = kFirst + kRowsAtOnce, kLeft = kRows - kFirst;
    // The step to the next rows, or to the next K-group.
    constexpr int64_t kStep = (kRows > kNext ? kRowsAtOnce : kAPanelWidth - kFirst) * sizeof(acc_t);
    register Aligned a_0 asm("v0");
    register Aligned a_1 asm("v1");
    register Aligned a_2 asm("v2");
    if constexpr (kLeft <= kLanes) {
      asm volatile("ldr q0, [%0], %2" : "+r"(a), "=w"(a_0) : "i"(kStep) : "memory");
      add_vectors<kFirst>({a_0}, column, sum);
    } else if constexpr (kLeft <= 2 * kLanes) {
      asm volatile("ldp q0, q1, [%0], %3" : "+r"(a), "=w"(a_0), "=w"(a_1) : "i"(kStep) : "memory");
      add_vectors<kFirst>({a_0, a_1}, column, sum);
    } else {
      asm volatile("ld1 {v0.16b, v1.16b, v2.16b}, [%0], %4"
                   : "+r"(a), "=w"(a_0), "=w"(a_1), "=w"(a_2)
                   : "r"(kStep)
                   : "memory");
      add_vectors<kFirst>({a_0, a_1, a_2}, column, sum);
    }
    if constexpr (kRows > kNext) add_rows<kNext>(a, column, sum);
  }

  // The same for the rows in kNumVectors vectors of A.
  template <int kFirst, int kNumVectors, int kRows, int kVectors>
  MOE_EXT_TARGET MOE_EXT_KERNEL void add_vectors(const Aligned (&a)[kNumVectors],
                                                 const Aligned (&column)[kVectors],
                                                 Aligned (&sum)[kRows][kVectors]) {
    constexpr int kUsed = std::min(kNumVectors * kLanes, kRows - kFirst);
    MOE_EXT_UNROLL for (int r = 0; r < kUsed; ++r) {
      MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
        Multiply::add(a[r / kLanes], r % kLanes, column[v], sum[kFirst + r][v]);
      }
    }
  }
};

}  // namespace
}  // namespace moe_ext::cpu
