// dispatch_plan and dispatch: the checks of their arguments, and their outputs.
#pragma once

#include <tuple>

#include "routing.h"

namespace moe_ext {

inline void check_dispatch_plan(const Tensor& expert_index, const c10::SymInt& num_experts) {
  constexpr auto op = "dispatch_plan";
  TORCH_CHECK_VALUE(expert_index.dim() == 1 || expert_index.dim() == 2, op,
                    ": expert_index must have 1 or 2 dimensions, got shape ",
                    expert_index.sym_sizes());
  check_index(op, "expert_index", expert_index, /*like=*/expert_index);
  check_num_experts(op, num_experts, /*least=*/0);
}

// Creates permutation [R], inverse in the shape of expert_index, tokens_per_expert [E] and offsets
// [E + 1].
inline std::tuple<Tensor, Tensor, Tensor, Tensor> dispatch_plan_outputs(
    Empty& empty, const Tensor& expert_index, const c10::SymInt& num_experts) {
  return {empty(expert_index, {expert_index.sym_numel()}, at::kLong),
          empty(expert_index, expert_index.sym_sizes(), at::kLong),
          empty(expert_index, {num_experts}, at::kLong),
          empty(expert_index, {num_experts + 1}, at::kLong)};
}

inline void check_dispatch(const Tensor& x, const Tensor& inverse,
                           const OptionalTensor& token_offsets) {
  constexpr auto op = "dispatch";
  check_dim(op, "x", x, 2);
  check_floating(op, "x", x);
  check_shape(op, "x", x, {check_slots(op, inverse, token_offsets, x), x.sym_size(1)});
}

// Creates the rows, [R, D].
inline Tensor dispatch_output(Empty& empty, const Tensor& x, const Tensor& inverse) {
  return empty(x, {inverse.sym_numel(), x.sym_size(1)}, x.scalar_type());
}

inline void check_dispatch_backward(const Tensor& grad_rows, const Tensor& inverse,
                                    const OptionalTensor& token_offsets) {
  constexpr auto op = "_dispatch_backward";
  check_dim(op, "grad_rows", grad_rows, 2);
  check_floating(op, "grad_rows", grad_rows);
  check_slots(op, inverse, token_offsets, grad_rows);
  check_shape(op, "grad_rows", grad_rows, {inverse.sym_numel(), grad_rows.sym_size(1)});
}

// Creates the gradient of x, [T, D].
inline Tensor dispatch_gradient(Empty& empty, const Tensor& grad_rows, const Tensor& inverse,
                                const OptionalTensor& token_offsets) {
  return empty(grad_rows, {num_tokens_of(inverse, token_offsets), grad_rows.sym_size(1)},
               grad_rows.scalar_type());
}

}  // namespace moe_ext
