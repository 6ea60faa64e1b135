// importance and importance_and_load: the checks of their arguments, and their outputs.
#pragma once

#include "checks.h"

namespace moe_ext {

inline void check_importance(const char* op, const Tensor& gates, const Tensor& expert_index,
                             const c10::SymInt& num_experts) {
  check_dim(op, "gates", gates, 2);
  check_floating(op, "gates", gates);
  check_index(op, "expert_index", expert_index, gates, gates.sym_sizes());
  check_num_experts(op, num_experts);
}

// Creates importance [E], or load [E].
inline Tensor importance_output(Empty& empty, const Tensor& gates, const c10::SymInt& num_experts) {
  return empty(gates, {num_experts}, accumulate_type(gates));
}

}  // namespace moe_ext
