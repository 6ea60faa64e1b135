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
const CodeKernels& avx512_vbmi_code_kernels_of_e4m3();

}  // namespace moe_ext::cpu
