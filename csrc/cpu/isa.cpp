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

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <stdexcept>
#include <string>

#include "../kernels/machine.h"
#include "vectorize.h"

namespace moe_ext::cpu {
namespace {

struct Choice {
  Isa isa;
  const char* name;
};

// From best to worst.
constexpr Choice kChoices[] = {
    {Isa::kAmx, "amx"},        {Isa::kAvx512Bf16, "avx512_bf16"}, {Isa::kAvx512, "avx512"},
    {Isa::kAvx2, "avx2"},      {Isa::kNeonBf16, "neon_bf16"},     {Isa::kNeon, "neon"},
    {Isa::kDefault, "default"}};

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

bool available(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAmx:
      return available(Isa::kAvx512Bf16) && has_amx();
    case Isa::kAvx512Bf16:
      return available(Isa::kAvx512) && __builtin_cpu_supports("avx512bf16");
    case Isa::kAvx512:
      return has_x86_64_v4();
    case Isa::kAvx2:
      return has_x86_64_v3();
#elif defined(__aarch64__)
    case Isa::kNeonBf16:
      return has_bf16();
    case Isa::kNeon:
      return true;
#endif
    case Isa::kDefault:
      return true;
    default:
      return false;
  }
}

// Intel's vdpbf16ps has the throughput of its float32 instructions; AMD's has twice the throughput.
bool preferred(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512Bf16 && !__builtin_cpu_is("amd")) return false;
#endif
  return available(isa);
}

Isa choose() {
  const char* forced = std::getenv("MOE_EXT_ISA");
  const auto* chosen =
      std::find_if(std::begin(kChoices), std::end(kChoices), [&](const Choice& choice) {
        return forced == nullptr ? preferred(choice.isa) : forced == std::string(choice.name);
      });
  const auto refuse = [&](const char* rule) {
    throw std::invalid_argument(std::string("MOE_EXT_ISA must ") + rule + ", got " + forced);
  };
  if (chosen == std::end(kChoices)) {
    refuse("be default, avx2, avx512, avx512_bf16, amx, neon or neon_bf16");
  }
  if (!available(chosen->isa)) refuse("name an instruction set of this processor");
  return chosen->isa;
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

const char* isa_name() {
  return std::find_if(std::begin(kChoices), std::end(kChoices),
                      [](const Choice& choice) { return choice.isa == isa(); })
      ->name;
}

}  // namespace moe_ext::cpu
