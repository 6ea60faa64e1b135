#include "processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace moe_ext::cpu {
namespace {

#if defined(__x86_64__)
// The x86-64 ABI levels; clang's __builtin_cpu_supports knows them from version 18 on.
#if defined(__clang__) && __clang_major__ < 18
bool has_x86_64_v3() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kFma = 1u << 12, kMovbe = 1u << 22, kF16c = 1u << 29, kLzcnt = 1u << 5;
  constexpr unsigned kLeaf1 = kFma | kMovbe | kF16c;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __get_cpuid(1, &a, &b, &c, &d) &&
         (c & kLeaf1) == kLeaf1 && __get_cpuid(0x80000001, &a, &b, &c, &d) && (c & kLzcnt) != 0;
}

bool has_x86_64_v4() {
  return has_x86_64_v3() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#else
bool has_x86_64_v3() { return __builtin_cpu_supports("x86-64-v3"); }
bool has_x86_64_v4() { return __builtin_cpu_supports("x86-64-v4"); }
#endif

// Asks the operating system for permission to use AMX tiles. The tile sizes in cpuid leaf 0x1D are
// not checked: some virtual machines leave them empty although the only palette works.
bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16) == 0 || (d & kTile) == 0) {
    return false;
  }
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(2)
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

#if defined(__aarch64__)
bool has_bf16() {
#if defined(__linux__)
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16 of the kernel's asm/hwcap.h
  return (getauxval(AT_HWCAP2) & kBf16) != 0;
#elif defined(__APPLE__)
  int found = 0;
  size_t size = sizeof(found);
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &size, nullptr, 0) == 0 && found != 0;
#else
  return false;
#endif
}
#endif

Vendor vendor() {
#if defined(__x86_64__)
  if (__builtin_cpu_is("amd")) return Vendor::kAmd;
  if (__builtin_cpu_is("intel")) return Vendor::kIntel;
#endif
  return Vendor::kAny;
}

Isa highest() {
#if defined(__x86_64__)
  if (!has_x86_64_v3()) return Isa::kDefault;
  if (!has_x86_64_v4()) return Isa::kAvx2;
  if (!__builtin_cpu_supports("avx512bf16")) return Isa::kAvx512;
  return has_amx() ? Isa::kAmx : Isa::kAvx512Bf16;
#elif defined(__aarch64__)
  return has_bf16() ? Isa::kNeonBf16 : Isa::kNeon;
#else
  return Isa::kDefault;
#endif
}

}  // namespace

Processor this_processor() { return {.vendor = vendor(), .highest = highest()}; }

}  // namespace moe_ext::cpu
