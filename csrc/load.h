// load: the host functions.
#pragma once

#include <tuple>

#include "checks.h"
#include "device.h"
#include "kernels/load.h"

namespace moe_ext {

inline void check_load(const char* op, const Tensor& clean_logits, const Tensor& noise_stddev,
                       const Tensor& threshold, const Tensor& expert_index,
                       const OptionalTensor& group_offsets) {
  check_dim(op, "clean_logits", clean_logits, 2);
  check_floating(op, "clean_logits", clean_logits);
  const auto type = accumulate_type(clean_logits);
  const auto num_tokens = clean_logits.sym_size(0);
  check_argument(op, "noise_stddev", noise_stddev, clean_logits, type, clean_logits.sym_sizes());
  check_argument(op, "threshold", threshold, clean_logits, type, {num_tokens, 2});
  check_dim(op, "expert_index", expert_index, 2);
  check_index(op, "expert_index", expert_index, clean_logits,
              {num_tokens, expert_index.sym_size(1)});
  if (group_offsets) check_bounds(op, "group_offsets", *group_offsets, clean_logits, 2);
}

// The shape of load: [E], or [G, E] for G groups of rows.
inline c10::SymDimVector load_shape(const Tensor& clean_logits,
                                    const OptionalTensor& group_offsets) {
  if (!group_offsets) return {clean_logits.sym_size(1)};
  return {group_offsets->sym_size(0) - 1, clean_logits.sym_size(1)};
}

// The groups of rows as kernels read them.
struct RowGroupTensor {
  RowGroupTensor(const char* op, const OptionalTensor& group_offsets, int64_t num_rows,
                 bool check_values)
      : bounds(contiguous_index(group_offsets)),
        groups{.bounds = data_of<int64_t>(bounds),
               .num_groups = group_offsets ? bounds.numel() - 1 : 1,
               .num_rows = num_rows} {
    if (group_offsets && check_values) check_offsets(op, "group_offsets", bounds, num_rows);
  }

  Tensor bounds;
  RowGroups groups;
};

template <typename Device>
Tensor load(const Tensor& clean_logits, const Tensor& noise_stddev, const Tensor& threshold,
            const Tensor& expert_index, const OptionalTensor& group_offsets) {
  constexpr auto op = "load";
  check_load(op, clean_logits, noise_stddev, threshold, expert_index, group_offsets);
  Tensor load = Device::empty(clean_logits, load_shape(clean_logits, group_offsets),
                              accumulate_type(clean_logits));
  Device::compute(clean_logits, [&] {
    const Tensor clean = clean_logits.contiguous(), stddev = noise_stddev.contiguous(),
                 limits = threshold.contiguous(), chosen = contiguous_index(expert_index);
    if (Device::kReadsValues) check_chosen_experts(op, chosen, clean.size(1));
    const RowGroupTensor tensor(op, group_offsets, clean.size(0), Device::kReadsValues);
    with_type(clean, [&]<typename scalar_t>() {
      using acc_t = acc_type<scalar_t>;
      Device::run(Load<scalar_t>{.clean_logits = clean.const_data_ptr<scalar_t>(),
                                 .noise_stddev = stddev.const_data_ptr<acc_t>(),
                                 .threshold = limits.const_data_ptr<acc_t>(),
                                 .expert_index = chosen.const_data_ptr<int64_t>(),
                                 .k = chosen.size(1),
                                 .num_experts = clean.size(1),
                                 .groups = tensor.groups,
                                 .load = load.mutable_data_ptr<acc_t>()});
    });
  });
  return load;
}

// Returns the gradients of clean_logits, noise_stddev and threshold.
template <typename Device>
std::tuple<Tensor, Tensor, Tensor> load_backward(
    const Tensor& grad_load, const Tensor& clean_logits, const Tensor& noise_stddev,
    const Tensor& threshold, const Tensor& expert_index, const OptionalTensor& group_offsets) {
  constexpr auto op = "_load_backward";
  check_load(op, clean_logits, noise_stddev, threshold, expert_index, group_offsets);
  check_argument(op, "grad_load", grad_load, clean_logits, accumulate_type(clean_logits),
                 load_shape(clean_logits, group_offsets));
  Tensor grad_clean = empty_of(Device::empty, clean_logits);
  Tensor grad_stddev = empty_of(Device::empty, noise_stddev);
  Tensor grad_threshold = empty_of(Device::empty, threshold);
  Device::compute(clean_logits, [&] {
    const Tensor grad = grad_load.contiguous(), clean = clean_logits.contiguous(),
                 stddev = noise_stddev.contiguous(), limits = threshold.contiguous(),
                 chosen = contiguous_index(expert_index);
    if (Device::kReadsValues) check_chosen_experts(op, chosen, clean.size(1));
    const RowGroupTensor tensor(op, group_offsets, clean.size(0), Device::kReadsValues);
    with_type(clean, [&]<typename scalar_t>() {
      using acc_t = acc_type<scalar_t>;
      Device::run(
          LoadBackward<scalar_t>{.grad_load = grad.const_data_ptr<acc_t>(),
                                 .clean_logits = clean.const_data_ptr<scalar_t>(),
                                 .noise_stddev = stddev.const_data_ptr<acc_t>(),
                                 .threshold = limits.const_data_ptr<acc_t>(),
                                 .expert_index = chosen.const_data_ptr<int64_t>(),
                                 .k = chosen.size(1),
                                 .num_experts = clean.size(1),
                                 .groups = tensor.groups,
                                 .grad_clean_logits = grad_clean.mutable_data_ptr<scalar_t>(),
                                 .grad_noise_stddev = grad_stddev.mutable_data_ptr<acc_t>(),
                                 .grad_threshold = grad_threshold.mutable_data_ptr<acc_t>()});
    });
  });
  return {grad_clean, grad_stddev, grad_threshold};
}

}  // namespace moe_ext
