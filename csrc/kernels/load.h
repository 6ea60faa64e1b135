// Load(X) (App. A).
#pragma once

#include "row_groups.h"

namespace moe_ext {

// load[g, i] = sum over the rows of group g of the probability that the row selects expert i.
template <typename scalar_t>
struct Load {
  using acc_t = acc_type<scalar_t>;

  const scalar_t* clean_logits;  // [T, E]
  const acc_t* noise_stddev;     // [T, E]
  const acc_t* threshold;        // [T, 2]
  const int64_t* expert_index;   // [T, K]
  int64_t k;
  int64_t num_experts;
  RowGroups groups;
  acc_t* load;  // [G, E]

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CPU(Load)
MOE_EXT_RUNS_ON_CUDA(Load)

template <typename scalar_t>
struct LoadBackward {
  using acc_t = acc_type<scalar_t>;

  const acc_t* grad_load;        // [G, E]
  const scalar_t* clean_logits;  // [T, E]
  const acc_t* noise_stddev;     // [T, E]
  const acc_t* threshold;        // [T, 2]
  const int64_t* expert_index;   // [T, K]
  int64_t k;
  int64_t num_experts;
  RowGroups groups;
  scalar_t* grad_clean_logits;
  acc_t* grad_noise_stddev;
  acc_t* grad_threshold;

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CPU(LoadBackward)
MOE_EXT_RUNS_ON_CUDA(LoadBackward)

}  // namespace moe_ext
