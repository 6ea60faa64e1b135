// The table that selects GEMM kernels. It also selects the instruction set.
//
// All kernels of a type on a processor compute the same sums in the same order, so a row has the
// same result with any number of other rows. Only this allows to select by the number of rows. For
// the same reason, kernels are selected by the vendor and not by their measured speed: a
// measurement could select other kernels, and so other results, in the next run.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "../../kernels/export.h"
#include "../isa.h"
#include "../processor.h"

namespace moe_ext::cpu {

// The types of operands. A rule has a set of them.
enum Types : unsigned { kFloat64 = 1, kFloat32 = 2, kBFloat16 = 4, kFloat16 = 8 };

// How B [K, N] of C = A B lies in memory: its rows are contiguous along N, or its columns along K.
enum class Layout { kAny, kAlongN, kAlongK };

// How B is read. kPacks: the tiles of C read it from packed micro-panels, or in place if that is
// possible and faster. kAxpyf, kDotxf: these kernels read it in place.
enum class Reading { kPacks, kAxpyf, kDotxf };

constexpr int kMaxFewRows = 10;  // of A for axpyf and dotxf
constexpr int64_t kAnyRows = std::numeric_limits<int64_t>::max();

struct GemmRule {
  unsigned types;
  Isa isa;            // that the kernels need
  Vendor vendor;      // the only vendor that prefers this instruction set, or kAny
  int64_t last_rows;  // the most rows of A
  Layout layout;
  Reading reading;
  const char* kernels;
};

// All rules, from best to worst: the first one that applies is used. GEMMs whose sizes are no
// multiples of a vector pack B with the same instructions instead of reading it in place.
MOE_EXT_KERNEL_API std::span<const GemmRule> gemm_rules();

// Returns the instruction set that is used on a processor unless MOE_EXT_ISA names another.
MOE_EXT_KERNEL_API Isa preferred_isa(const Processor& processor);

// Returns the rule for GEMMs of a type, with an instruction set in use.
MOE_EXT_KERNEL_API const GemmRule& gemm_rule(Isa isa, Types type, int64_t rows, Layout layout);

}  // namespace moe_ext::cpu
