// importance and importance_and_load: the host functions.
#pragma once

#include <tuple>

#include "checks.h"
#include "device.h"
#include "kernels/importance.h"

namespace moe_ext {

inline void check_importance(const char* op, const Tensor& gates, const Tensor& expert_index,
                             const c10::SymInt& num_experts) {
  check_dim(op, "gates", gates, 2);
  check_floating(op, "gates", gates);
  check_index(op, "expert_index", expert_index, gates, gates.sym_sizes());
  check_num_experts(op, num_experts);
}

// Computes importance [E] and, if `load` is not null, the load [E].
template <typename Device>
Tensor importance_and(Tensor* load, const char* op, const Tensor& gates, const Tensor& expert_index,
                      const c10::SymInt& num_experts) {
  check_importance(op, gates, expert_index, num_experts);
  Tensor importance = Device::empty(gates, {num_experts}, accumulate_type(gates));
  if (load != nullptr) *load = empty_of(Device::empty, importance);
  Device::compute(gates, [&] {
    const Tensor kept = gates.contiguous(), index = contiguous_index(expert_index);
    if (Device::kReadsValues) check_index_range(op, "expert_index", index, importance.numel());
    with_type(kept, [&]<typename scalar_t>() {
      const auto sum = [&](const scalar_t* terms, const Tensor& sums) {
        Device::run(
            Importance<scalar_t>{.gates = terms,
                                 .expert_index = index.const_data_ptr<int64_t>(),
                                 .num_tokens = index.size(0),
                                 .k = index.size(1),
                                 .num_experts = importance.numel(),
                                 .importance = sums.mutable_data_ptr<acc_type<scalar_t>>()});
      };
      sum(kept.const_data_ptr<scalar_t>(), importance);
      if (load != nullptr) sum(nullptr, *load);
    });
  });
  return importance;
}

template <typename Device>
Tensor importance(const Tensor& gates, const Tensor& expert_index, c10::SymInt num_experts) {
  return importance_and<Device>(/*load=*/nullptr, "importance", gates, expert_index, num_experts);
}

template <typename Device>
std::tuple<Tensor, Tensor> importance_and_load(const Tensor& gates, const Tensor& expert_index,
                                               c10::SymInt num_experts) {
  Tensor load;
  const Tensor importance =
      importance_and<Device>(&load, "importance_and_load", gates, expert_index, num_experts);
  return {importance, load};
}

}  // namespace moe_ext
