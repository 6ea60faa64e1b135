// The instruction sets of the kernels.
//
// The kernels use the best one for the processor. MOE_EXT_ISA=default|avx2|avx512|avx512_bf16|amx|
// neon|neon_bf16 forces one; avx512_bf16, amx and neon_bf16 add instructions for bfloat16 GEMMs.
#pragma once

#include "../kernels/export.h"

namespace moe_ext::cpu {

// Each instruction set includes the sets of its architecture before it.
enum class Isa { kDefault, kAvx2, kAvx512, kAvx512Bf16, kAmx, kNeon, kNeonBf16 };

// Whether a processor with the instruction set `highest` has `isa`.
constexpr bool includes(Isa highest, Isa isa) {
  const bool same_architecture = (isa >= Isa::kNeon) == (highest >= Isa::kNeon);
  return isa == Isa::kDefault || (same_architecture && isa <= highest);
}

// Returns the instruction set in use. Throws std::invalid_argument if MOE_EXT_ISA is invalid or
// names an instruction set that this processor lacks.
Isa isa();

// The names of MOE_EXT_ISA. isa_named returns null for an unknown name.
MOE_EXT_KERNEL_API const char* name_of(Isa isa);
MOE_EXT_KERNEL_API const Isa* isa_named(const char* name);

}  // namespace moe_ext::cpu
