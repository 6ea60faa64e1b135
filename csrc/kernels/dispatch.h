// The dispatch plan.
#pragma once

#include "types.h"

namespace moe_ext {

// A stable sort of the slots by expert.
struct DispatchPlan {
  const int64_t* expert_index;  // [R]
  int64_t num_rows;
  int64_t num_experts;
  int64_t* permutation;        // [R]
  int64_t* inverse;            // [R]
  int64_t* tokens_per_expert;  // [E]
  int64_t* offsets;            // [E + 1]

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_DECLARE_ON_CPU(DispatchPlan)
MOE_EXT_DECLARE_ON_CUDA(DispatchPlan)

}  // namespace moe_ext
