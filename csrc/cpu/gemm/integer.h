// Products with packed weights in integer arithmetic: rows of A are rounded to int8 in segments of
// up to 32 inputs, and the products of a segment are summed in int32.
//
// A number a of a segment becomes s q with s = max |a| / 127 and q = round(a / s), so its error is
// at most s / 2.
#pragma once

#include <cstdint>

#include "../../packed.h"

namespace moe_ext::cpu {

// The codes of a format as small integers: value = factor (code' - offset), where code' is the
// unsigned integer of a code.
struct IntegerCodes {
  float factor;
  int32_t offset;
  uint8_t table[16];  // code' of each code of 4 bits; unused if counts_up
};

// Whether the values of 4-bit codes are consecutive: code' is the code.
bool counts_up(const PackedFormat& format);

// Returns the integers of a format that has them; see is_integer.
IntegerCodes integer_codes(const PackedFormat& format);

// Rounded rows of A, and for each segment of them s times the factor of the format, and with the
// sum Q of its q: Q times the negative offset of the format, and s Q.
struct IntegerRows {
  const int8_t* numbers;
  const float* scales;
  const int32_t* offsets;
  const float* totals;
  int64_t ld;            // of numbers
  int64_t segment;       // the number of inputs in a segment: 8, 16 or 32
  int64_t num_segments;  // of a row
};

// How far the integer kernels prefetch behind the panel that they read.
constexpr int64_t kIntegerBytesAhead = 16 << 10;

// C [num_rows, 16 num_panels] = A W, or C += A W with `add`. All have the same results.
using IntegerKernel = void (*)(const PackedLayout& layout, const IntegerCodes& codes,
                               const uint8_t* panels, int64_t num_panels, const IntegerRows& a,
                               int64_t num_rows, bool add, float* c, int64_t ldc);
IntegerKernel portable_integer_kernel(const PackedFormat& format);
IntegerKernel avx2_integer_kernel(const PackedFormat& format);
IntegerKernel avx512_vnni_integer_kernel(const PackedFormat& format);

// Returns the workspace size of integer_gemm in floats.
int64_t integer_workspace_size(int64_t m, int64_t k);

// C [m, n] = A W, or C += A W with `add`; A is [m, k] and contiguous, C has float sums. W is the
// first n outputs of the panels.
template <typename scalar_t>
void integer_gemm(int64_t m, int64_t n, const PackedLayout& layout, const uint8_t* panels,
                  const scalar_t* a, bool add, float* c, float* workspace);

}  // namespace moe_ext::cpu
