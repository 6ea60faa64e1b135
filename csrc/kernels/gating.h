// Noisy top-k gating (Sec. 2.1, Eqs. 3-5).
#pragma once

#include "types.h"

namespace moe_ext {

template <typename scalar_t>
struct NoisyTopKGating {
  using acc_t = acc_type<scalar_t>;

  const scalar_t* clean_logits;      // [T, E]
  const scalar_t* raw_noise_stddev;  // [T, E], or null
  const scalar_t* noise;             // [T, E], or null
  double noise_epsilon;
  int64_t num_tokens;
  int64_t num_experts;
  int64_t k;
  acc_t* gates;              // [T, K]
  int64_t* expert_index;     // [T, K]
  acc_t* threshold;          // [T, 2]
  int64_t* threshold_index;  // [T, 2]
  acc_t* noise_stddev;       // [T, E], not written without noise

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CPU(NoisyTopKGating)
MOE_EXT_RUNS_ON_CUDA(NoisyTopKGating)

// dL/dH_a = g_a (v_a - sum_b g_b v_b) for the kept a, plus the gradients of the thresholds H_(k)
// and H_(k+1). dL/dclean = dL/dH; dL/dstddev = noise dL/dH + grad_noise_stddev.
template <typename scalar_t>
struct NoisyTopKGatingBackward {
  using acc_t = acc_type<scalar_t>;

  const acc_t* grad_gates;           // [T, K], or null
  const acc_t* grad_threshold;       // [T, 2], or null
  const acc_t* grad_noise_stddev;    // [T, E], or null
  const acc_t* gates;                // [T, K]
  const int64_t* expert_index;       // [T, K]
  const int64_t* threshold_index;    // [T, 2]
  const scalar_t* raw_noise_stddev;  // [T, E], or null
  const scalar_t* noise;             // [T, E], or null
  int64_t num_tokens;
  int64_t num_experts;
  int64_t k;
  scalar_t* grad_clean_logits;      // [T, E]
  scalar_t* grad_raw_noise_stddev;  // [T, E], not written without noise

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CPU(NoisyTopKGatingBackward)
MOE_EXT_RUNS_ON_CUDA(NoisyTopKGatingBackward)

}  // namespace moe_ext
