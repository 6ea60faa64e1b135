// Compiles one loop for several instruction sets and selects one at run time.
//
// A kernel is a struct with a static, always_inline `run`. `vectorized<Kernel>(args...)` calls the
// version for the instruction set in use. The results do not depend on it: sums have a fixed order
// and nothing is contracted.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "isa.h"

#define MOE_EXT_KERNEL static inline __attribute__((always_inline))
// Hints for the next loop: unroll it; its arrays are identical or do not overlap.
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed"  // like gcc, ignore a hint that cannot be followed
#define MOE_EXT_UNROLL _Pragma("clang loop unroll_count(16)")
#define MOE_EXT_NO_ALIAS _Pragma("clang loop vectorize(assume_safety)")
#else
#define MOE_EXT_UNROLL _Pragma("GCC unroll 16")
#define MOE_EXT_NO_ALIAS _Pragma("GCC ivdep")
#endif

// The function attributes for an instruction set, with its full vector width. Every 64-bit Arm
// processor has NEON.
#if defined(__x86_64__)
#if defined(__clang__)
#define MOE_EXT_TARGET_OF_512_BITS(set) __attribute__((target(set), min_vector_width(512)))
#else
#define MOE_EXT_TARGET_OF_512_BITS(set) __attribute__((target(set ",prefer-vector-width=512")))
#endif
#define MOE_EXT_TARGET_AVX2 __attribute__((target("arch=x86-64-v3")))
#define MOE_EXT_TARGET_AVX512 MOE_EXT_TARGET_OF_512_BITS("arch=x86-64-v4")
#define MOE_EXT_TARGET_AVX512_BF16 MOE_EXT_TARGET_OF_512_BITS("arch=x86-64-v4,avx512bf16")
#define MOE_EXT_TARGET_AVX512_VBMI \
  MOE_EXT_TARGET_OF_512_BITS("arch=x86-64-v4,avx512bf16,avx512vbmi")
#define MOE_EXT_TARGET_AVX512_VNNI MOE_EXT_TARGET_OF_512_BITS("arch=x86-64-v4,avx512vnni")
#define MOE_EXT_TARGET_AMX MOE_EXT_TARGET_OF_512_BITS("arch=x86-64-v4,avx512bf16,amx-tile,amx-bf16")
#elif defined(__aarch64__)
#define MOE_EXT_TARGET_NEON
#define MOE_EXT_TARGET_NEON_BF16 __attribute__((target("arch=armv8.2-a+bf16")))
#endif

namespace moe_ext::cpu {

#if defined(__x86_64__)
template <typename Kernel, typename... Args>
MOE_EXT_TARGET_AVX512 __attribute__((noinline)) void run_avx512(Args... args) {
  Kernel::run(args...);
}

template <typename Kernel, typename... Args>
MOE_EXT_TARGET_AVX2 __attribute__((noinline)) void run_avx2(Args... args) {
  Kernel::run(args...);
}
#endif

// Callers cast a mutable array to const: Args are template arguments, so a kernel is compiled again
// for another type of pointer.
template <typename Kernel, typename... Args>
void vectorized(Args... args) {
#if defined(__x86_64__)
  if (isa() >= Isa::kAvx512) return run_avx512<Kernel>(args...);
  if (isa() == Isa::kAvx2) return run_avx2<Kernel>(args...);
#endif
  Kernel::run(args...);
}

// A sum has 32 partial sums, so it is bitwise identical for every vector width.
constexpr int64_t kLanes = 32;

template <typename acc_t>
MOE_EXT_KERNEL acc_t sum_of_lanes(acc_t* lane) {
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t l = 0; l < width; ++l) lane[l] += lane[l + width];
  }
  return lane[0];
}

template <typename acc_t, typename Term>
MOE_EXT_KERNEL acc_t sum_of_terms(int64_t size, const Term& term) {
  acc_t lane[kLanes] = {};
  const int64_t whole = size - size % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) lane[l] = term(i + l, lane[l]);
  }
  for (int64_t i = whole; i < size; ++i) lane[i - whole] = term(i, lane[i - whole]);
  return sum_of_lanes(lane);
}

template <typename acc_t>
MOE_EXT_KERNEL acc_t sum(const acc_t* a, int64_t size) {
  return sum_of_terms<acc_t>(
      size, [&](int64_t i, acc_t partial)
                __attribute__((always_inline)) { return partial + a[i]; });
}

// Returns the largest number, -infinity if there is none. NaN is ignored.
template <typename acc_t>
MOE_EXT_KERNEL acc_t largest_of(const acc_t* a, int64_t size) {
  acc_t lane[kLanes];
  std::fill_n(lane, kLanes, -std::numeric_limits<acc_t>::infinity());
  const auto take = [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    for (int64_t l = 0; l < count; ++l) lane[l] = a[first + l] > lane[l] ? a[first + l] : lane[l];
  };
  const int64_t whole = size - size % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) take(i, kLanes);
  take(whole, size - whole);
  return *std::max_element(lane, lane + kLanes);
}

// Calls body(i) for each i that passes the test, in ascending order. Vector comparisons write one
// byte for each i; body is called only for nonzero bytes.
template <typename Test, typename Body>
MOE_EXT_KERNEL void for_each_passing(int64_t size, const Test& test, const Body& body) {
  constexpr int64_t kWord = 8;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    uint8_t passes[kLanes];
    for (int64_t l = 0; l < kLanes; ++l) passes[l] = test(i + l);
    for (int64_t w = 0; w < kLanes; w += kWord) {
      uint64_t word;
      std::memcpy(&word, passes + w, kWord);
      for (; word != 0; word &= word - 1) body(i + w + std::countr_zero(word) / 8);
    }
  }
  for (; i < size; ++i) {
    if (test(i)) body(i);
  }
}

}  // namespace moe_ext::cpu
