// The kernels that read packed weights. They compute the numbers from codes and scales in
// registers.
#pragma once

#include <cstdint>

#include "../../packed.h"

namespace moe_ext::cpu {

// How an UnpackKernel writes w: as floats, rounded to bfloat16, or as pairs of two inputs in
// bfloat16.
enum class Unpacked { kFloats, kRounded, kPairs };

// The largest number of inputs of a K-block, and of those that an UnpackKernel writes.
constexpr int64_t kMaxInputs = 512;

// Inputs of a panel, from one that is a multiple of 8.
struct PanelInputs {
  const uint8_t* panel;
  int64_t first, size;
};

// Writes w [inputs.size, 16]; `to` has rows ld elements apart and space for a multiple of 8 inputs.
// A row of pairs, which are floats, has two inputs. `next`, of the same size, is prefetched; it may
// not exist.
using UnpackKernel = void (*)(const PackedLayout& layout, const PanelInputs& inputs,
                              const PanelInputs& next, void* to, int64_t ld);

// C [num_rows, 16 num_panels] = A W, or C += A W with `add`. The rows of A are K-groups, lda apart.
// The chains are those of a GemmKernel for each K-block of kc inputs. The panels at `next` are
// prefetched near the end, unless it is null.
using FewRowsKernel = void (*)(const PackedLayout& layout, const uint8_t* panels,
                               int64_t num_panels, const uint8_t* next, int64_t kc, const float* a,
                               int64_t lda, int64_t num_rows, bool add, float* c, int64_t ldc);

constexpr int kNumFewRows = 4;

struct FewRowsKernels {
  bool pairs;     // whether a K-group of A is a pair of bfloat16 numbers; otherwise it is a float
  bool rounds_a;  // whether floats of A are rounded to the type of the weights
  FewRowsKernel kernels[kNumFewRows];  // [i] for at most 2^i rows, or null
};

// The kernels of a format for scalar_t.
struct CodeKernels {
  UnpackKernel unpack;  // for kFloats; rounded to scalar_t, unless there are pairs
  UnpackKernel unpack_rounded = nullptr;  // null if the instruction set has no such
  UnpackKernel unpack_pairs = nullptr;    // instruction
  FewRowsKernels few_rows = {};
};

// Returns the kernels for weights that are rounded to scalar_t. Those for few rows have the order
// of micro_kernels<scalar_t>().
template <typename scalar_t>
CodeKernels code_kernels(const PackedFormat& format);

// The kernels of each instruction set.
const CodeKernels& portable_code_kernels(const PackedFormat& format);
const CodeKernels& avx2_code_kernels(const PackedFormat& format);
const CodeKernels& avx512_code_kernels(const PackedFormat& format);
const CodeKernels& avx512_bf16_code_kernels(const PackedFormat& format);
const CodeKernels& avx512_vbmi_code_kernels_of_e4m3();

// Those that round floats to half_t, and those for few rows in the order of AMX.
template <typename half_t>
const CodeKernels& portable_rounded_code_kernels(const PackedFormat& format);
template <typename half_t>
const CodeKernels& avx2_rounded_code_kernels(const PackedFormat& format);
template <typename half_t>
const CodeKernels& avx512_rounded_code_kernels(const PackedFormat& format);
const FewRowsKernels& amx_few_rows_kernels(const PackedFormat& format);

// Whether the weights of a format are bfloat16 numbers: values of 4 bits times powers of two.
constexpr bool are_bfloat16(const PackedFormat& format) {
  return format.codes == Codes::kTable && format.scales == Scales::kE8M0;
}

}  // namespace moe_ext::cpu
