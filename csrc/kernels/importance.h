// Importance(X) (Eq. 6) and the exact load.
#pragma once

#include "types.h"

namespace moe_ext {

// importance[i] = sum of the gates of expert i, or the number of its slots.
template <typename scalar_t>
struct Importance {
  const scalar_t* gates;        // [T, K], or null: each gate counts as 1
  const int64_t* expert_index;  // [T, K]
  int64_t num_tokens;
  int64_t k;
  int64_t num_experts;
  acc_type<scalar_t>* importance;  // [E]

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CPU(Importance)
MOE_EXT_RUNS_ON_CUDA(Importance)

}  // namespace moe_ext
