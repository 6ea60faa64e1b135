// importance: the checks of its arguments, and its output.
#pragma once

#include "checks.h"

namespace moe_ext {

inline void check_importance(const Tensor& gates, const Tensor& expert_index,
                             const c10::SymInt& num_experts) {
  constexpr auto op = "importance";
  check_dim(op, "gates", gates, 2);
  check_floating(op, "gates", gates);
  check_index(op, "expert_index", expert_index, gates, gates.sym_sizes());
  check_num_experts(op, num_experts);
}

// Creates importance [E].
inline Tensor importance_output(Empty& empty, const Tensor& gates, const c10::SymInt& num_experts) {
  return empty(gates, {num_experts}, accumulate_type(gates));
}

}  // namespace moe_ext
