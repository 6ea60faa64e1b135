// The kernels that read packed weights. They compute the numbers from codes and scales in
// registers.
#pragma once

#include <cstdint>

#include "../../packed.h"

namespace moe_ext::cpu {

// How an UnpackKernel writes w: as floats, rounded to bfloat16, or as pairs of two inputs in
// bfloat16.
enum class Unpacked { kFloats, kRounded, kPairs };

// Writes w [num_inputs, 16] of a panel from first_input, a multiple of 8; `to` has rows ld elements
// apart and space for a multiple of 8 inputs. A row of pairs, which are floats, has two inputs.
using UnpackKernel = void (*)(const PackedLayout& layout, const uint8_t* panel, int64_t first_input,
                              int64_t num_inputs, void* to, int64_t ld);

// C [num_rows, 16 num_panels] = A W, or C += A W with `add`, for the inputs from first_input. A is
// a micro-panel. The chains are those of a GemmKernel.
using FewRowsKernel = void (*)(const PackedLayout& layout, const uint8_t* panels,
                               int64_t num_panels, int64_t first_input, int64_t num_inputs,
                               const float* a, int64_t num_rows, bool add, float* c, int64_t ldc);

constexpr int kNumFewRows = 4;

// The kernels of a format.
struct CodeKernels {
  UnpackKernel unpack;
  UnpackKernel unpack_rounded = nullptr;     // null if the instruction set has no such
  UnpackKernel unpack_pairs = nullptr;       // instruction
  FewRowsKernel few_rows[kNumFewRows] = {};  // [i] for at most 2^i rows, or null
};

// Returns the kernels of the instruction set in use, for K-groups of pairs or of single numbers.
const CodeKernels& code_kernels(const PackedFormat& format, bool pairs);

// The kernels of each instruction set.
const CodeKernels& portable_code_kernels(const PackedFormat& format);
const CodeKernels& avx2_code_kernels(const PackedFormat& format);
const CodeKernels& avx512_code_kernels(const PackedFormat& format);
const CodeKernels& avx512_bf16_code_kernels(const PackedFormat& format);

}  // namespace moe_ext::cpu
