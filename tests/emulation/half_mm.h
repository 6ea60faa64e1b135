// Replaces csrc/cuda_host/half_mm.h: on the CPU, torch has no GEMM whose result has another type.
#pragma once

#include <ATen/ops/mm.h>

#include "../tensor.h"

namespace moe_ext {

inline Tensor half_mm(const Tensor& a, const Tensor& b) {
  return at::mm(a.to(at::kFloat), b.to(at::kFloat));
}

}  // namespace moe_ext
