// Replaces csrc/cuda_host/mm.h: on the CPU, torch has no GEMM whose result has another type.
#pragma once

#include <ATen/ops/mm.h>

#include "../tensor.h"

namespace moe_ext {

inline Tensor accumulated_mm(const Tensor& a, const Tensor& b) {
  const auto type = accumulate_type(a);
  return at::mm(a.to(type), b.to(type));
}

}  // namespace moe_ext
