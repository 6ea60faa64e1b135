// The backward pass of combine.
#pragma once

#include "slots.h"

namespace moe_ext {

// dE_j = G_j dy and dG_j = <dy, E_j> for the slots of each token.
template <typename scalar_t>
struct CombineBackward {
  using acc_t = acc_type<scalar_t>;

  const scalar_t* grad_y;  // [T, width]
  const scalar_t* rows;    // [R, width]
  const acc_t* gates;      // [R]
  Slots slots;
  int64_t width;
  scalar_t* grad_rows;
  acc_t* grad_gates;

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CPU(CombineBackward)
MOE_EXT_RUNS_ON_CUDA(CombineBackward)

}  // namespace moe_ext
