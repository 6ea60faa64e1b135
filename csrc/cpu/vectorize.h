// One loop, compiled for several instruction sets, chosen at run time.
//
// A kernel is a struct with a static, always_inline `run`. `vectorized<Kernel>(args...)` calls the
// copy compiled for the best set that the processor has; MOE_EXT_ISA=default|avx2|avx512, or one of
// those below with instructions for bfloat16 products too, forces one. The arithmetic does not
// depend on the choice: sums have a fixed order and nothing is contracted.
#pragma once

#include <cmath>
#include <cstdint>

#define MOE_EXT_KERNEL static inline __attribute__((always_inline))
// Hints for the loop that follows: unroll it; its arrays are the same or do not overlap.
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed"  // where a hint cannot be followed, as with gcc
#define MOE_EXT_UNROLL _Pragma("clang loop unroll_count(16)")
#define MOE_EXT_NO_ALIAS _Pragma("clang loop vectorize(assume_safety)")
#else
#define MOE_EXT_UNROLL _Pragma("GCC unroll 16")
#define MOE_EXT_NO_ALIAS _Pragma("GCC ivdep")
#endif

// The attributes of a function for an instruction set, with vectors as wide as it has them.
#if defined(__x86_64__)
#if defined(__clang__)
#define MOE_EXT_TARGET_OF_512_BITS(set) __attribute__((target(set), min_vector_width(512)))
#else
#define MOE_EXT_TARGET_OF_512_BITS(set) __attribute__((target(set ",prefer-vector-width=512")))
#endif
#define MOE_EXT_TARGET_AVX2 __attribute__((target("arch=x86-64-v3")))
#define MOE_EXT_TARGET_AVX512 MOE_EXT_TARGET_OF_512_BITS("arch=x86-64-v4")
#define MOE_EXT_TARGET_AVX512_BF16 MOE_EXT_TARGET_OF_512_BITS("arch=x86-64-v4,avx512bf16")
#define MOE_EXT_TARGET_AMX MOE_EXT_TARGET_OF_512_BITS("arch=x86-64-v4,amx-tile,amx-bf16")
#endif

namespace moe_ext::cpu {

// Each has what those before it have.
enum class Isa { kDefault, kAvx2, kAvx512, kAvx512Bf16, kAmx };

// The instruction set in use; throws once, at first use, if MOE_EXT_ISA asks for one that is
// missing.
Isa isa();
const char* isa_name();

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

template <typename Kernel, typename... Args>
void vectorized(Args... args) {
#if defined(__x86_64__)
  if (isa() >= Isa::kAvx512) return run_avx512<Kernel>(args...);
  if (isa() == Isa::kAvx2) return run_avx2<Kernel>(args...);
#endif
  Kernel::run(args...);
}

// Sums of 32 fixed partial sums: the same bits whatever the width of a vector.
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

}  // namespace moe_ext::cpu
