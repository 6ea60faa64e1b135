// batchwise_topm and selected_softmax: the host functions.
#pragma once

#include <limits>
#include <tuple>

#include "checks.h"
#include "device.h"
#include "kernels/balanced_gating.h"

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

// Returns row_index [G, E, m] and mth_score [G, E].
template <typename Device>
std::tuple<Tensor, Tensor> batchwise_topm(const Tensor& scores, c10::SymInt m,
                                          c10::SymInt first_expert,
                                          std::optional<c10::SymInt> num_experts) {
  check_batchwise_topm(scores, m, first_expert, num_experts);
  const auto num_groups = scores.sym_size(0), num_columns = scores.sym_size(2);
  Tensor row_index = Device::empty(scores, {num_groups, num_columns, m}, at::kLong);
  Tensor mth_score = Device::empty(scores, {num_groups, num_columns}, scores.scalar_type());
  Device::compute(scores, [&] {
    if (row_index.size(2) == 0) {
      mth_score.fill_(std::numeric_limits<double>::infinity());
      return;
    }
    const Tensor source = scores.contiguous();
    with_type(source, [&]<typename scalar_t>() {
      Device::run(BatchwiseTopM<scalar_t>{
          .scores = source.const_data_ptr<scalar_t>(),
          .num_groups = source.size(0),
          .num_rows = source.size(1),
          .num_experts = source.size(2),
          .m = row_index.size(2),
          .first_expert = first_expert.expect_int(),
          .columns_of_batch = num_experts ? num_experts->expect_int() : source.size(2),
          .row_index = row_index.mutable_data_ptr<int64_t>(),
          .mth_score = mth_score.mutable_data_ptr<scalar_t>()});
    });
  });
  return {row_index, mth_score};
}

// Returns the gates, [R].
template <typename Device>
Tensor selected_softmax(const Tensor& logits, const Tensor& expert_index,
                        const Tensor& token_offsets) {
  constexpr auto op = "selected_softmax";
  check_dim(op, "logits", logits, 2);
  check_floating(op, "logits", logits);
  check_dim(op, "expert_index", expert_index, 1);
  check_index(op, "expert_index", expert_index, logits);
  check_index(op, "token_offsets", token_offsets, logits, {logits.sym_size(0) + 1});
  Tensor gates = Device::empty(logits, expert_index.sym_sizes(), accumulate_type(logits));
  Device::compute(logits, [&] {
    const Tensor source = logits.contiguous(), chosen = contiguous_index(expert_index),
                 offsets = contiguous_index(token_offsets);
    if (Device::kReadsValues) {
      check_index_range(op, "expert_index", chosen, source.size(1));
      check_offsets(op, "token_offsets", offsets, chosen.numel());
    }
    with_type(source, [&]<typename scalar_t>() {
      Device::run(SelectedSoftmax<scalar_t>{.logits = source.const_data_ptr<scalar_t>(),
                                            .expert_index = chosen.const_data_ptr<int64_t>(),
                                            .token_offsets = offsets.const_data_ptr<int64_t>(),
                                            .num_tokens = source.size(0),
                                            .num_experts = source.size(1),
                                            .num_selected = chosen.numel(),
                                            .gates = gates.mutable_data_ptr<acc_type<scalar_t>>()});
    });
  });
  return gates;
}

// Returns the gradient of the logits, [T, E].
template <typename Device>
Tensor selected_softmax_backward(const Tensor& grad_gates, const Tensor& gates,
                                 const Tensor& expert_index, const Tensor& token_offsets,
                                 c10::SymInt num_experts) {
  constexpr auto op = "_selected_softmax_backward";
  check_dim(op, "gates", gates, 1);
  check_floating(op, "gates", gates);
  check_type(op, "gates", gates, accumulate_type(gates));
  check_argument(op, "grad_gates", grad_gates, gates, gates.scalar_type(), gates.sym_sizes());
  check_index(op, "expert_index", expert_index, gates, gates.sym_sizes());
  check_bounds(op, "token_offsets", token_offsets, gates, 1);
  check_num_experts(op, num_experts);
  Tensor grad_logits =
      Device::empty(gates, {token_offsets.sym_size(0) - 1, num_experts}, gates.scalar_type());
  Device::compute(gates, [&] {
    const Tensor grad = grad_gates.contiguous(), weights = gates.contiguous(),
                 chosen = contiguous_index(expert_index), offsets = contiguous_index(token_offsets);
    if (Device::kReadsValues) {
      check_index_range(op, "expert_index", chosen, grad_logits.size(1));
      check_offsets(op, "token_offsets", offsets, chosen.numel());
    }
    const auto run = [&]<typename scalar_t>() {
      Device::run(SelectedSoftmaxBackward<scalar_t>{
          .grad_gates = grad.const_data_ptr<scalar_t>(),
          .gates = weights.const_data_ptr<scalar_t>(),
          .expert_index = chosen.const_data_ptr<int64_t>(),
          .token_offsets = offsets.const_data_ptr<int64_t>(),
          .num_tokens = grad_logits.size(0),
          .num_experts = grad_logits.size(1),
          .num_selected = chosen.numel(),
          .grad_logits = grad_logits.mutable_data_ptr<scalar_t>()});
    };
    if (gates.scalar_type() == at::kDouble) {
      run.template operator()<double>();
    } else {
      run.template operator()<float>();
    }
  });
  return grad_logits;
}

}  // namespace moe_ext
