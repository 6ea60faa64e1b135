// topk_routing: the host functions.
#pragma once

#include <cmath>
#include <string>
#include <string_view>
#include <tuple>

#include "checks.h"
#include "device.h"
#include "kernels/topk_routing.h"
#include "math/topk_routing.h"

namespace moe_ext {

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
    math::for_each_score([&](std::string_view name, auto) { append_name(names, name); });
    TORCH_CHECK_VALUE(false, op, ": score must be one of ", names, ", got '", rule.score, "'");
  }
  const double in_type = in_accumulate_type(logits, rule.scale);
  TORCH_CHECK_VALUE(in_type > 0 && std::isfinite(in_type), op,
                    ": scale must be above 0, and finite in the dtype of the gates, got ",
                    rule.scale);
}

inline void check_topk_routing(const Tensor& logits, const c10::SymInt& k,
                               const OptionalTensor& bias, const GateRule& rule,
                               const ExpertGroups<c10::SymInt>& groups,
                               const OptionalTensor& given) {
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

// Returns gates and expert_index, [T, K]; with `given`, expert_index is a copy of it.
template <typename Device>
std::tuple<Tensor, Tensor> topk_routing(const Tensor& logits, c10::SymInt k,
                                        const OptionalTensor& bias, std::string_view score,
                                        bool renormalize, double scale, c10::SymInt num_groups,
                                        c10::SymInt groups_per_token, c10::SymInt group_score_k,
                                        const OptionalTensor& given) {
  const GateRule rule{.score = score, .renormalize = renormalize, .scale = scale};
  check_topk_routing(logits, k, bias, rule, {num_groups, groups_per_token, group_score_k}, given);
  const auto num_tokens = logits.sym_size(0);
  Tensor gates = Device::empty(logits, {num_tokens, k}, accumulate_type(logits));
  Tensor expert_index = Device::empty(logits, {num_tokens, k}, at::kLong);
  Device::compute(logits, [&] {
    const Tensor input = logits.contiguous();  // the check of the experts needs memory for a row
    if (given) {
      expert_index.copy_(*given);
      if (Device::kReadsValues) check_chosen_experts("topk_routing", expert_index, input.size(1));
    }
    const Tensor added = contiguous(bias);
    with_type(input, [&]<typename scalar_t>() {
      using acc_t = acc_type<scalar_t>;
      Device::run(TopKRouting<scalar_t>{.logits = input.const_data_ptr<scalar_t>(),
                                        .bias = data_of<acc_t>(added),
                                        .rule = rule,
                                        .groups = {.number = num_groups.expect_int(),
                                                   .per_token = groups_per_token.expect_int(),
                                                   .score_k = group_score_k.expect_int()},
                                        .selects = !given,
                                        .num_tokens = input.size(0),
                                        .num_experts = input.size(1),
                                        .k = gates.size(1),
                                        .gates = gates.mutable_data_ptr<acc_t>(),
                                        .expert_index = expert_index.mutable_data_ptr<int64_t>()});
    });
  });
  return {gates, expert_index};
}

// Returns the gradient of the logits.
template <typename Device>
Tensor topk_routing_backward(const Tensor& grad_gates, const Tensor& logits,
                             const Tensor& expert_index, std::string_view score, bool renormalize,
                             double scale) {
  constexpr auto op = "_topk_routing_backward";
  const GateRule rule{.score = score, .renormalize = renormalize, .scale = scale};
  check_dim(op, "expert_index", expert_index, 2);
  const auto k = expert_index.sym_size(1);
  check_gate_rule(op, logits, "expert_index.size(1)", k, rule);
  check_index(op, "expert_index", expert_index, logits, {logits.sym_size(0), k});
  check_argument(op, "grad_gates", grad_gates, logits, accumulate_type(logits),
                 expert_index.sym_sizes());
  Tensor grad_logits = empty_of(Device::empty, logits);
  Device::compute(logits, [&] {
    const Tensor chosen = contiguous_index(expert_index);
    if (Device::kReadsValues) check_index_range(op, "expert_index", chosen, logits.size(1));
    const Tensor grad = grad_gates.contiguous(), input = logits.contiguous();
    with_type(input, [&]<typename scalar_t>() {
      Device::run(
          TopKRoutingBackward<scalar_t>{.grad_gates = grad.const_data_ptr<acc_type<scalar_t>>(),
                                        .logits = input.const_data_ptr<scalar_t>(),
                                        .expert_index = chosen.const_data_ptr<int64_t>(),
                                        .rule = rule,
                                        .num_tokens = input.size(0),
                                        .num_experts = input.size(1),
                                        .k = chosen.size(1),
                                        .grad_logits = grad_logits.mutable_data_ptr<scalar_t>()});
    });
  });
  return grad_logits;
}

}  // namespace moe_ext
