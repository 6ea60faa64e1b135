#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string>

#include "vectorize.h"

namespace moe_ext::cpu {
namespace {

bool available(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return __builtin_cpu_supports("x86-64-v4");
    case Isa::kAvx2:
      return __builtin_cpu_supports("x86-64-v3");
#endif
    case Isa::kDefault:
      return true;
    default:
      return false;
  }
}

const char* name(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    default:
      return "default";
  }
}

Isa choose() {
  constexpr Isa kBestFirst[] = {Isa::kAvx512, Isa::kAvx2, Isa::kDefault};
  const char* forced = std::getenv("MOE_EXT_ISA");
  const auto* chosen = std::find_if(std::begin(kBestFirst), std::end(kBestFirst), [&](Isa isa) {
    return forced == nullptr ? available(isa) : forced == std::string(name(isa));
  });
  TORCH_CHECK_VALUE(chosen != std::end(kBestFirst),
                    "MOE_EXT_ISA must be default, avx2 or avx512, got ", forced);
  TORCH_CHECK_VALUE(available(*chosen),
                    "MOE_EXT_ISA must name an instruction set of this processor, got ", forced);
  return *chosen;
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

const char* isa_name() { return name(isa()); }

}  // namespace moe_ext::cpu
