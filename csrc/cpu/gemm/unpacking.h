// Unpacking: computes numbers of packed weights from their codes and scales.
#pragma once

#include <cstdint>

#include "../../packed.h"

namespace moe_ext::cpu {

// Writes w [round_up(num_inputs, 8), 16] of one panel from first_input, a multiple of 8; `to` has
// rows ld apart.
using UnpackKernel = void (*)(const PackedLayout& layout, const uint8_t* panel, int64_t first_input,
                              int64_t num_inputs, float* to, int64_t ld);

// Returns the kernel of the instruction set in use. All have the same results.
UnpackKernel unpack_kernel(Codes codes);

// The kernel of each instruction set.
UnpackKernel portable_unpack_kernel(Codes codes);
UnpackKernel avx2_unpack_kernel(Codes codes);
UnpackKernel avx512_unpack_kernel(Codes codes);

}  // namespace moe_ext::cpu
