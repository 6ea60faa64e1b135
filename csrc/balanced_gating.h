// batchwise_topm and selected_softmax: the checks of their arguments, and their outputs.
#pragma once

#include <tuple>

#include "checks.h"

namespace moe_ext {

inline void check_batchwise_topm(const Tensor& scores, const c10::SymInt& m,
                                 const c10::SymInt& first_expert,
                                 const std::optional<c10::SymInt>& num_experts) {
  constexpr auto op = "batchwise_topm";
  check_dim(op, "scores", scores, 3);
  check_floating(op, "scores", scores);
  TORCH_CHECK_VALUE(first_expert >= 0, op, ": first_expert must be at least 0, got ", first_expert);
  TORCH_CHECK_VALUE(!num_experts || *num_experts >= scores.sym_size(2), op,
                    ": num_experts must be at least scores.size(2) = ", scores.sym_size(2),
                    ", got ", *num_experts);
  // A compiler cannot compare symbolic numbers, which may depend on the values of tensors.
  const auto num_rows = scores.sym_size(1);
  const auto value = m.maybe_as_int(), most = num_rows.maybe_as_int();
  TORCH_CHECK_VALUE(!value || (*value >= 0 && (!most || *value <= *most)), op,
                    ": m must be between 0 and the number of rows = ", num_rows, ", got ", m);
}

// Creates row_index [G, E, m] and mth_score [G, E].
inline std::tuple<Tensor, Tensor> batchwise_topm_outputs(Empty& empty, const Tensor& scores,
                                                         const c10::SymInt& m) {
  const auto num_groups = scores.sym_size(0), num_experts = scores.sym_size(2);
  return {empty(scores, {num_groups, num_experts, m}, at::kLong),
          empty(scores, {num_groups, num_experts}, scores.scalar_type())};
}

inline void check_selected_softmax(const Tensor& logits, const Tensor& expert_index,
                                   const Tensor& token_offsets) {
  constexpr auto op = "selected_softmax";
  check_dim(op, "logits", logits, 2);
  check_floating(op, "logits", logits);
  check_dim(op, "expert_index", expert_index, 1);
  check_index(op, "expert_index", expert_index, logits);
  check_index(op, "token_offsets", token_offsets, logits, {logits.sym_size(0) + 1});
}

// Creates the gates, [R].
inline Tensor selected_softmax_output(Empty& empty, const Tensor& logits,
                                      const Tensor& expert_index) {
  return empty(logits, expert_index.sym_sizes(), accumulate_type(logits));
}

inline void check_selected_softmax_backward(const Tensor& grad_gates, const Tensor& gates,
                                            const Tensor& expert_index, const Tensor& token_offsets,
                                            const c10::SymInt& num_experts) {
  constexpr auto op = "_selected_softmax_backward";
  check_dim(op, "gates", gates, 1);
  check_floating(op, "gates", gates);
  check_type(op, "gates", gates, accumulate_type(gates));
  check_argument(op, "grad_gates", grad_gates, gates, gates.scalar_type(), gates.sym_sizes());
  check_index(op, "expert_index", expert_index, gates, gates.sym_sizes());
  check_bounds(op, "token_offsets", token_offsets, gates, 1);
  check_num_experts(op, num_experts);
}

// Creates the gradient of the logits, [T, E].
inline Tensor selected_softmax_gradient(Empty& empty, const Tensor& gates,
                                        const Tensor& token_offsets,
                                        const c10::SymInt& num_experts) {
  return empty(gates, {token_offsets.sym_size(0) - 1, num_experts}, gates.scalar_type());
}

}  // namespace moe_ext
