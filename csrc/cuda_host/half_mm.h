// The GEMM of torch whose result is not rounded to half precision. tests/emulation/half_mm.h
// replaces it.
#pragma once

#include <ATen/ops/mm.h>

#include "../tensor.h"

namespace moe_ext {

// Returns the product of matrices of a half type, in float32.
inline Tensor half_mm(const Tensor& a, const Tensor& b) { return at::mm(a, b, at::kFloat); }

}  // namespace moe_ext
