// topk_routing: the checks of its arguments, and its outputs.
#pragma once

#include <cmath>
#include <string>
#include <string_view>
#include <tuple>

#include "checks.h"
#include "math/topk_routing.h"

namespace moe_ext {

// How gates are computed from the logits of the chosen experts.
struct GateRule {
  std::string_view score;
  bool renormalize;
  double scale;
};

// The groups of experts among which a token selects: only its best groups.
template <typename Int>
struct Groups {
  Int number;
  Int per_token;
  Int score_k;  // a group's score is the sum of its score_k largest scores
};

// `k_name` is the argument that k comes from.
inline void check_gate_rule(const char* op, const Tensor& logits, const char* k_name,
                            const c10::SymInt& k, const GateRule& rule) {
  check_dim(op, "logits", logits, 2);
  check_floating(op, "logits", logits);
  check_k(op, k_name, k, logits.sym_size(1));
  bool known = false;
  math::for_each_score([&](std::string_view name, auto) { known |= name == rule.score; });
  if (!known) {
    std::string names;
    math::for_each_score(
        [&](std::string_view name, auto) { names.append(names.empty() ? "" : ", ").append(name); });
    TORCH_CHECK_VALUE(false, op, ": score must be one of ", names, ", got '", rule.score, "'");
  }
  const double in_type = in_accumulate_type(logits, rule.scale);
  TORCH_CHECK_VALUE(in_type > 0 && std::isfinite(in_type), op,
                    ": scale must be above 0, and finite in the dtype of the gates, got ",
                    rule.scale);
}

inline void check_topk_routing(const Tensor& logits, const c10::SymInt& k,
                               const OptionalTensor& bias, const GateRule& rule,
                               const Groups<c10::SymInt>& groups, const OptionalTensor& given) {
  constexpr auto op = "topk_routing";
  check_gate_rule(op, logits, "k", k, rule);
  const auto num_experts = logits.sym_size(1);
  if (bias) check_argument(op, "bias", *bias, logits, accumulate_type(logits), {num_experts});
  if (given) check_index(op, "expert_index", *given, logits, {logits.sym_size(0), k});
  TORCH_CHECK_VALUE(groups.number >= 1 && num_experts % groups.number == 0, op,
                    ": num_groups must divide num_experts = ", num_experts, ", got ",
                    groups.number);
  TORCH_CHECK_VALUE(groups.per_token >= 1 && groups.per_token <= groups.number, op,
                    ": groups_per_token must be between 1 and num_groups = ", groups.number,
                    ", got ", groups.per_token);
  if (groups.number == 1) return;
  const auto size = num_experts / groups.number;
  TORCH_CHECK_VALUE(k <= groups.per_token * size, op, ": k must be at most the ",
                    groups.per_token * size, " experts of groups_per_token groups, got ", k);
  TORCH_CHECK_VALUE(groups.score_k >= 1 && groups.score_k <= size, op,
                    ": group_score_k must be between 1 and num_experts / num_groups = ", size,
                    ", got ", groups.score_k);
}

// Creates gates and expert_index, [T, K].
inline std::tuple<Tensor, Tensor> topk_routing_outputs(Empty& empty, const Tensor& logits,
                                                       const c10::SymInt& k) {
  const auto num_tokens = logits.sym_size(0);
  return {empty(logits, {num_tokens, k}, accumulate_type(logits)),
          empty(logits, {num_tokens, k}, at::kLong)};
}

inline void check_topk_routing_backward(const Tensor& grad_gates, const Tensor& logits,
                                        const Tensor& expert_index, const GateRule& rule) {
  constexpr auto op = "_topk_routing_backward";
  check_dim(op, "expert_index", expert_index, 2);
  const auto k = expert_index.sym_size(1);
  check_gate_rule(op, logits, "expert_index.size(1)", k, rule);
  check_index(op, "expert_index", expert_index, logits, {logits.sym_size(0), k});
  check_argument(op, "grad_gates", grad_gates, logits, accumulate_type(logits),
                 expert_index.sym_sizes());
}

}  // namespace moe_ext
