// dispatch_plan and dispatch: the host functions.
#pragma once

#include <tuple>

#include "kernels/dispatch.h"
#include "routing.h"

namespace moe_ext {

// Returns permutation [R], inverse in the shape of expert_index, tokens_per_expert [E] and offsets
// [E + 1]. Slot t * k + j is the j-th expert of token t.
template <typename Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> dispatch_plan(const Tensor& expert_index,
                                                         c10::SymInt num_experts) {
  constexpr auto op = "dispatch_plan";
  TORCH_CHECK_VALUE(expert_index.dim() == 1 || expert_index.dim() == 2, op,
                    ": expert_index must have 1 or 2 dimensions, got shape ",
                    expert_index.sym_sizes());
  check_index(op, "expert_index", expert_index, /*like=*/expert_index);
  check_num_experts(op, num_experts, /*least=*/0);
  const auto indices = [&](c10::SymIntArrayRef shape) {
    return Device::empty(expert_index, shape, at::kLong);
  };
  Tensor permutation = indices({expert_index.sym_numel()});
  Tensor inverse = indices(expert_index.sym_sizes());
  Tensor tokens_per_expert = indices({num_experts});
  Tensor offsets = indices({num_experts + 1});
  Device::compute(expert_index, [&] {
    const int64_t num_experts = tokens_per_expert.numel();
    const Tensor chosen = contiguous_index(expert_index);
    if (Device::kReadsValues) check_index_range(op, "expert_index", chosen, num_experts);
    Device::run(DispatchPlan{.expert_index = chosen.const_data_ptr<int64_t>(),
                             .num_rows = chosen.numel(),
                             .num_experts = num_experts,
                             .permutation = permutation.mutable_data_ptr<int64_t>(),
                             .inverse = inverse.mutable_data_ptr<int64_t>(),
                             .tokens_per_expert = tokens_per_expert.mutable_data_ptr<int64_t>(),
                             .offsets = offsets.mutable_data_ptr<int64_t>()});
  });
  return {permutation, inverse, tokens_per_expert, offsets};
}

// Returns the rows [R, D] of the tokens x [T, D].
template <typename Device>
Tensor dispatch(const Tensor& x, const Tensor& inverse, const OptionalTensor& token_offsets) {
  constexpr auto op = "dispatch";
  check_dim(op, "x", x, 2);
  check_floating(op, "x", x);
  check_shape(op, "x", x, {check_slots(op, inverse, token_offsets, x), x.sym_size(1)});
  Tensor rows = Device::empty(x, {inverse.sym_numel(), x.sym_size(1)}, x.scalar_type());
  Device::compute(x, [&] {
    const SlotTensors tensors(op, inverse, token_offsets, Device::kReadsValues);
    const Tensor source = x.contiguous();
    with_type(source, [&]<typename scalar_t>() {
      Device::run(RowsOfSlots<scalar_t>{.x = source.const_data_ptr<scalar_t>(),
                                        .slots = tensors.slots,
                                        .width = source.size(1),
                                        .rows = rows.mutable_data_ptr<scalar_t>()});
    });
  });
  return rows;
}

// Returns dx [T, D]: dx_t is the sum of drows over the slots of t, in order.
template <typename Device>
Tensor dispatch_backward(const Tensor& grad_rows, const Tensor& inverse,
                         const OptionalTensor& token_offsets) {
  constexpr auto op = "_dispatch_backward";
  check_dim(op, "grad_rows", grad_rows, 2);
  check_floating(op, "grad_rows", grad_rows);
  check_slots(op, inverse, token_offsets, grad_rows);
  check_shape(op, "grad_rows", grad_rows, {inverse.sym_numel(), grad_rows.sym_size(1)});
  Tensor grad_x =
      Device::empty(grad_rows, {num_tokens_of(inverse, token_offsets), grad_rows.sym_size(1)},
                    grad_rows.scalar_type());
  Device::compute(grad_rows, [&] {
    const SlotTensors tensors(op, inverse, token_offsets, Device::kReadsValues);
    sum_over_slots<Device>(grad_rows, tensors.slots, /*weights=*/Tensor(), grad_x);
  });
  return grad_x;
}

}  // namespace moe_ext
