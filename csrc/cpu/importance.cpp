// Importance(X) = sum_x G(x) (Eq. 6) and the exact load on the CPU.
#include "../importance.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include "../implement.h"
#include "empty_rows.h"
#include "parallel.h"

namespace moe_ext::cpu {
namespace {

// Sums term(slot) over the slots of each expert; index is contiguous, [T, K].
template <typename acc_t, typename Term>
void sum_of_slots(const Tensor& index, Tensor& sum, const Term& term) {
  const int64_t k = index.size(1);
  const auto* expert = index.const_data_ptr<int64_t>();
  sum_over_tokens<acc_t>({0, index.size(0)}, k, sum, [&](int64_t begin, int64_t end, acc_t* sums) {
    for (int64_t slot = begin * k; slot < end * k; ++slot) sums[expert[slot]] += term(slot);
  });
}

// Checks the arguments and returns expert_index as the kernels read it.
Tensor checked_index(const char* op, const Tensor& gates, const Tensor& expert_index,
                     int64_t num_experts) {
  check_importance(op, gates, expert_index, num_experts);
  Tensor index = contiguous_index(expert_index);
  check_index_range(op, "expert_index", index, num_experts);
  return index;
}

Tensor importance_of(const Tensor& gates, const Tensor& index, int64_t num_experts) {
  const Tensor kept = gates.contiguous();
  Tensor importance = importance_output(empty, gates, num_experts);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, kept.scalar_type(), "importance", [&] {
    using acc_t = at::opmath_type<scalar_t>;
    const auto* gate = kept.const_data_ptr<scalar_t>();
    sum_of_slots<acc_t>(index, importance,
                        [&](int64_t slot) { return static_cast<acc_t>(gate[slot]); });
  });
  return importance;
}

Tensor importance_cpu(const Tensor& gates, const Tensor& expert_index, int64_t num_experts) {
  return importance_of(gates, checked_index("importance", gates, expert_index, num_experts),
                       num_experts);
}

std::tuple<Tensor, Tensor> importance_and_load_cpu(const Tensor& gates, const Tensor& expert_index,
                                                   int64_t num_experts) {
  const Tensor index = checked_index("importance_and_load", gates, expert_index, num_experts);
  Tensor load = importance_output(empty, gates, num_experts);
  AT_DISPATCH_FLOATING_TYPES(load.scalar_type(), "importance_and_load", [&] {
    sum_of_slots<scalar_t>(index, load, [](int64_t) { return scalar_t(1); });
  });
  return {importance_of(gates, index, num_experts), load};
}

}  // namespace
}  // namespace moe_ext::cpu

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  moe_ext::implement<"importance", &moe_ext::cpu::importance_cpu>(m);
  moe_ext::implement<"importance_and_load", &moe_ext::cpu::importance_and_load_cpu>(m);
}
