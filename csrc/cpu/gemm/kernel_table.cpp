#include "kernel_table.h"

#include <algorithm>
#include <iterator>

namespace moe_ext::cpu {
namespace {

constexpr int64_t kFew = kMaxFewRows;
constexpr unsigned kFloats = kFloat64 | kFloat32, kAll = kFloats | kBFloat16 | kFloat16;

// With few rows of A, reading B takes most of the time, and packing B would double that. Widened
// numbers are half precision that the kernel converts to float32.
//
// The instruction vdpbf16ps multiplies two pairs of bfloat16 numbers in each lane. On AMD's
// processors, it has the throughput of the float32 instructions, so it is twice as fast. On Intel's
// it has half of their throughput.
constexpr GemmRule kRules[] = {
    {kBFloat16, Isa::kAmx, Vendor::kAny, kFew, Layout::kAlongN, Reading::kAxpyf,
     "AVX-512, widened numbers, sums in the order of AMX"},
    {kBFloat16, Isa::kAmx, Vendor::kAny, kFew, Layout::kAlongK, Reading::kDotxf,
     "AVX-512, widened numbers, sums in the order of AMX"},
    {kBFloat16, Isa::kAmx, Vendor::kAny, kAnyRows, Layout::kAny, Reading::kPacks, "AMX"},

    {kBFloat16, Isa::kAvx512Bf16, Vendor::kAmd, kFew, Layout::kAlongN, Reading::kAxpyf,
     "AVX512-BF16"},
    {kBFloat16, Isa::kAvx512Bf16, Vendor::kAmd, kFew, Layout::kAlongK, Reading::kDotxf,
     "AVX512-BF16"},
    {kBFloat16, Isa::kAvx512Bf16, Vendor::kAmd, kAnyRows, Layout::kAny, Reading::kPacks,
     "AVX512-BF16"},

    {kAll, Isa::kAvx512, Vendor::kAny, kFew, Layout::kAlongN, Reading::kAxpyf, "AVX-512"},
    {kAll, Isa::kAvx512, Vendor::kAny, kFew, Layout::kAlongK, Reading::kDotxf, "AVX-512"},
    {kAll, Isa::kAvx512, Vendor::kAny, kAnyRows, Layout::kAny, Reading::kPacks, "AVX-512"},

    {kAll, Isa::kAvx2, Vendor::kAny, kFew, Layout::kAlongN, Reading::kAxpyf, "AVX2"},
    {kAll, Isa::kAvx2, Vendor::kAny, kFew, Layout::kAlongK, Reading::kDotxf, "AVX2"},
    {kAll, Isa::kAvx2, Vendor::kAny, kAnyRows, Layout::kAny, Reading::kPacks, "AVX2"},

    {kBFloat16, Isa::kNeonBf16, Vendor::kAny, kFew, Layout::kAlongN, Reading::kAxpyf, "NEON-BF16"},
    {kBFloat16, Isa::kNeonBf16, Vendor::kAny, kFew, Layout::kAlongK, Reading::kDotxf, "NEON-BF16"},
    {kBFloat16, Isa::kNeonBf16, Vendor::kAny, kAnyRows, Layout::kAny, Reading::kPacks, "NEON-BF16"},

    {kFloats, Isa::kNeon, Vendor::kAny, kFew, Layout::kAlongN, Reading::kAxpyf, "NEON"},
    {kFloats, Isa::kNeon, Vendor::kAny, kFew, Layout::kAlongK, Reading::kDotxf, "NEON"},
    {kAll, Isa::kNeon, Vendor::kAny, kAnyRows, Layout::kAny, Reading::kPacks, "NEON"},

    {kFloats, Isa::kDefault, Vendor::kAny, kFew, Layout::kAlongN, Reading::kAxpyf, "portable"},
    {kFloats, Isa::kDefault, Vendor::kAny, kFew, Layout::kAlongK, Reading::kDotxf, "portable"},
    {kAll, Isa::kDefault, Vendor::kAny, kAnyRows, Layout::kAny, Reading::kPacks, "portable"},
};

static_assert(std::all_of(std::begin(kRules), std::end(kRules), [](const GemmRule& rule) {
  return rule.reading == Reading::kPacks || rule.last_rows <= kMaxFewRows;
}));

}  // namespace

std::span<const GemmRule> gemm_rules() { return kRules; }

Isa preferred_isa(const Processor& processor) {
  const auto preferred = [&](const GemmRule& rule) {
    return includes(processor.highest, rule.isa) &&
           (rule.vendor == Vendor::kAny || rule.vendor == processor.vendor);
  };
  return std::find_if(std::begin(kRules), std::end(kRules), preferred)->isa;
}

const GemmRule& gemm_rule(Isa isa, Types type, int64_t rows, Layout layout) {
  const auto applies = [&](const GemmRule& rule) {
    return (rule.types & type) != 0 && includes(isa, rule.isa) && rows <= rule.last_rows &&
           (rule.layout == Layout::kAny || rule.layout == layout);
  };
  return *std::find_if(std::begin(kRules), std::end(kRules), applies);
}

}  // namespace moe_ext::cpu
