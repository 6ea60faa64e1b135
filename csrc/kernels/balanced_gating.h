// Strictly balanced gating (App. F): the batchwise mask, and the softmax over the selected experts.
#pragma once

#include "types.h"

namespace moe_ext {

// The m >= 1 rows with the largest scores of each column.
template <typename scalar_t>
struct BatchwiseTopM {
  const scalar_t* scores;  // [G, N, E]
  int64_t num_groups;
  int64_t num_rows;
  int64_t num_experts;
  int64_t m;
  // The first column has the number first_expert among the columns_of_batch columns of the batch.
  int64_t first_expert;
  int64_t columns_of_batch;
  int64_t* row_index;   // [G, E, m]
  scalar_t* mth_score;  // [G, E]

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CPU(BatchwiseTopM)
MOE_EXT_RUNS_ON_CUDA(BatchwiseTopM)

template <typename scalar_t>
struct SelectedSoftmax {
  const scalar_t* logits;        // [T, E]
  const int64_t* expert_index;   // [R]
  const int64_t* token_offsets;  // [T + 1]
  int64_t num_tokens;
  int64_t num_experts;
  int64_t num_selected;       // R
  acc_type<scalar_t>* gates;  // [R]

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CPU(SelectedSoftmax)
MOE_EXT_RUNS_ON_CUDA(SelectedSoftmax)

// dL/dlogit_i = G_i (v_i - sum_a G_a v_a) for each selected expert i, with v = dL/dG; 0 for the
// other experts.
template <typename scalar_t>
struct SelectedSoftmaxBackward {
  const scalar_t* grad_gates;    // [R]
  const scalar_t* gates;         // [R]
  const int64_t* expert_index;   // [R]
  const int64_t* token_offsets;  // [T + 1]
  int64_t num_tokens;
  int64_t num_experts;
  int64_t num_selected;   // R
  scalar_t* grad_logits;  // [T, E]

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_DECLARE_ON_CPU(SelectedSoftmaxBackward<float>)
MOE_EXT_DECLARE_ON_CPU(SelectedSoftmaxBackward<double>)
MOE_EXT_DECLARE_ON_CUDA(SelectedSoftmaxBackward<float>)
MOE_EXT_DECLARE_ON_CUDA(SelectedSoftmaxBackward<double>)

}  // namespace moe_ext
