// Scores, group-limited selection and gates of the top k.
#pragma once

#include <string_view>

#include "types.h"

namespace moe_ext {

// How gates are computed from the logits of the chosen experts.
struct GateRule {
  std::string_view score;
  bool renormalize;
  double scale;
};

// The groups of experts among which a token selects: only its best groups.
template <typename Int>
struct ExpertGroups {
  Int number;
  Int per_token;
  Int score_k;  // a group's score is the sum of its score_k largest scores
};

// Computes the gates of the experts in expert_index. If `selects`, it selects these experts first.
template <typename scalar_t>
struct TopKRouting {
  using acc_t = acc_type<scalar_t>;

  const scalar_t* logits;  // [T, E]
  const acc_t* bias;       // [E], or null
  GateRule rule;
  ExpertGroups<int64_t> groups;
  bool selects;
  int64_t num_tokens;
  int64_t num_experts;
  int64_t k;
  acc_t* gates;           // [T, K]
  int64_t* expert_index;  // [T, K]

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CPU(TopKRouting)
MOE_EXT_RUNS_ON_CUDA(TopKRouting)

template <typename scalar_t>
struct TopKRoutingBackward {
  using acc_t = acc_type<scalar_t>;

  const acc_t* grad_gates;      // [T, K]
  const scalar_t* logits;       // [T, E]
  const int64_t* expert_index;  // [T, K]
  GateRule rule;
  int64_t num_tokens;
  int64_t num_experts;
  int64_t k;
  scalar_t* grad_logits;  // [T, E]

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CPU(TopKRoutingBackward)
MOE_EXT_RUNS_ON_CUDA(TopKRoutingBackward)

}  // namespace moe_ext
