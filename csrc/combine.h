// combine: the host functions.
#pragma once

#include <ATen/ops/empty_like.h>

#include <tuple>

#include "kernels/combine.h"
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

// y_t = sum_j G(x_t)_j E_j(x_t) (Eq. 1), gathered through the inverse permutation.
template <typename Device>
Tensor combine(const Tensor& expert_output, const Tensor& gates, const Tensor& inverse,
               const OptionalTensor& token_offsets) {
  constexpr auto op = "combine";
  check_combine(op, expert_output, gates, inverse, token_offsets);
  Tensor y = Device::empty(expert_output,
                           {num_tokens_of(inverse, token_offsets), expert_output.sym_size(1)},
                           expert_output.scalar_type());
  Device::compute(expert_output, [&] {
    const SlotTensors tensors(op, inverse, token_offsets, Device::kReadsValues);
    sum_over_slots<Device>(expert_output, tensors.slots, gates.to(accumulate_type(expert_output)),
                           y);
  });
  return y;
}

// Returns the gradients of expert_output and gates.
template <typename Device>
std::tuple<Tensor, Tensor> combine_backward(const Tensor& grad_y, const Tensor& expert_output,
                                            const Tensor& gates, const Tensor& inverse,
                                            const OptionalTensor& token_offsets) {
  constexpr auto op = "_combine_backward";
  check_combine(op, expert_output, gates, inverse, token_offsets);
  check_argument(op, "grad_y", grad_y, expert_output, expert_output.scalar_type(),
                 {num_tokens_of(inverse, token_offsets), expert_output.sym_size(1)});
  Tensor grad_rows = empty_of(Device::empty, expert_output);
  Tensor grad_gates = empty_of(Device::empty, gates);
  Device::compute(expert_output, [&] {
    const SlotTensors tensors(op, inverse, token_offsets, Device::kReadsValues);
    const Tensor grad = grad_y.contiguous(), rows = expert_output.contiguous();
    const Tensor weights = gates.to(accumulate_type(rows)).contiguous();
    const bool same = gates.scalar_type() == weights.scalar_type();
    const Tensor grad_weights = same ? grad_gates : at::empty_like(weights);
    with_type(rows, [&]<typename scalar_t>() {
      using acc_t = acc_type<scalar_t>;
      Device::run(CombineBackward<scalar_t>{.grad_y = grad.const_data_ptr<scalar_t>(),
                                            .rows = rows.const_data_ptr<scalar_t>(),
                                            .gates = weights.const_data_ptr<acc_t>(),
                                            .slots = tensors.slots,
                                            .width = rows.size(1),
                                            .grad_rows = grad_rows.mutable_data_ptr<scalar_t>(),
                                            .grad_gates = grad_weights.mutable_data_ptr<acc_t>()});
    });
    if (!same) grad_gates.copy_(grad_weights);
  });
  return {grad_rows, grad_gates};
}

}  // namespace moe_ext
