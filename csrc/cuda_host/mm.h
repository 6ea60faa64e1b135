// GEMMs of torch whose results are not rounded to half precision.
#pragma once

#include <ATen/ops/mm.h>

#include "../tensor.h"

namespace moe_ext {

// Returns a times b in their accumulate_type.
inline Tensor accumulated_mm(const Tensor& a, const Tensor& b) {
  const auto type = accumulate_type(a);
  return type == a.scalar_type() ? at::mm(a, b) : at::mm(a, b, type);
}

}  // namespace moe_ext
