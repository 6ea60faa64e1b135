// combine: the checks of its arguments, and its outputs.
#pragma once

#include <tuple>

#include "routing.h"

namespace moe_ext {

inline void check_combine(const char* op, const Tensor& expert_output, const Tensor& gates,
                          const Tensor& inverse, const OptionalTensor& token_offsets) {
  check_dim(op, "expert_output", expert_output, 2);
  check_floating(op, "expert_output", expert_output);
  check_device(op, "gates", gates, expert_output);
  check_floating(op, "gates", gates);
  check_slots(op, inverse, token_offsets, expert_output);
  check_shape(op, "gates", gates, inverse.sym_sizes());
  check_shape(op, "expert_output", expert_output, {inverse.sym_numel(), expert_output.sym_size(1)});
}

// Creates y [T, D].
inline Tensor combine_output(Empty& empty, const Tensor& expert_output, const Tensor& inverse,
                             const OptionalTensor& token_offsets) {
  return empty(expert_output, {num_tokens_of(inverse, token_offsets), expert_output.sym_size(1)},
               expert_output.scalar_type());
}

inline void check_combine_backward(const Tensor& grad_y, const Tensor& expert_output,
                                   const Tensor& gates, const Tensor& inverse,
                                   const OptionalTensor& token_offsets) {
  constexpr auto op = "_combine_backward";
  check_combine(op, expert_output, gates, inverse, token_offsets);
  check_argument(op, "grad_y", grad_y, expert_output, expert_output.scalar_type(),
                 {num_tokens_of(inverse, token_offsets), expert_output.sym_size(1)});
}

inline std::tuple<Tensor, Tensor> combine_gradients(Empty& empty, const Tensor& expert_output,
                                                    const Tensor& gates) {
  return {empty_of(empty, expert_output), empty_of(empty, gates)};
}

}  // namespace moe_ext
