#include "isa.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>

#include "../kernels/machine.h"
#include "gemm/kernel_table.h"
#include "processor.h"

namespace moe_ext::cpu {
namespace {

struct Name {
  Isa isa;
  const char* text;
};

constexpr Name kNames[] = {{Isa::kDefault, "default"},   {Isa::kAvx2, "avx2"},
                           {Isa::kAvx512, "avx512"},     {Isa::kAvx512Bf16, "avx512_bf16"},
                           {Isa::kAmx, "amx"},           {Isa::kNeon, "neon"},
                           {Isa::kNeonBf16, "neon_bf16"}};

Isa choose() {
  const Processor processor = this_processor();
  const char* forced = std::getenv("MOE_EXT_ISA");
  if (forced == nullptr) return preferred_isa(processor);
  const auto refuse = [&](const char* rule) {
    throw std::invalid_argument(std::string("MOE_EXT_ISA must ") + rule + ", got " + forced);
  };
  const Isa* isa = isa_named(forced);
  if (isa == nullptr) refuse("be default, avx2, avx512, avx512_bf16, amx, neon or neon_bf16");
  if (!includes(processor.highest, *isa)) refuse("name an instruction set of this processor");
  return *isa;
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

const char* isa_name() { return name_of(isa()); }

const char* name_of(Isa isa) {
  return std::find_if(std::begin(kNames), std::end(kNames),
                      [&](const Name& name) { return name.isa == isa; })
      ->text;
}

const Isa* isa_named(const char* text) {
  for (const Name& name : kNames) {
    if (std::strcmp(name.text, text) == 0) return &name.isa;
  }
  return nullptr;
}

}  // namespace moe_ext::cpu
