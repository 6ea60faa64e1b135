// Subnormal numbers are 0 in the parallel loops: on many processors, an operation on one takes more
// than a hundred cycles. The error of a result is below the smallest normal number of its type.
#pragma once

#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moe_ext::cpu {

// Makes subnormal operands and results 0 on this thread during its lifetime.
class FlushSubnormals {
 public:
  FlushSubnormals() : before_(get()) { set(before_ | kFlush); }
  ~FlushSubnormals() { set((get() & ~kFlush) | (before_ & kFlush)); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kFlush = 0x8040;  // FTZ and DAZ
  static uint64_t get() { return _mm_getcsr(); }
  static void set(uint64_t control) { _mm_setcsr(static_cast<unsigned>(control)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kFlush = uint64_t{1} << 24;  // FZ
  static uint64_t get() {
    uint64_t control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
  }
  static void set(uint64_t control) { asm volatile("msr fpcr, %0" : : "r"(control)); }
#else
  static constexpr uint64_t kFlush = 0;
  static uint64_t get() { return 0; }
  static void set(uint64_t) {}
#endif

  const uint64_t before_;
};

}  // namespace moe_ext::cpu
