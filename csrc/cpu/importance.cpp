// Importance(X) = sum_x G(x) (Eq. 6) on the CPU.
#include "../importance.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include "empty_rows.h"
#include "parallel.h"

namespace moe_ext::cpu {
namespace {

Tensor importance_cpu(const Tensor& gates, const Tensor& expert_index, int64_t num_experts) {
  check_importance(gates, expert_index, num_experts);
  const int64_t k = gates.size(1);
  const Tensor kept = gates.contiguous();
  const Tensor chosen = contiguous_index(expert_index);
  check_index_range("importance", "expert_index", chosen, num_experts);
  Tensor importance = importance_output(empty, gates, num_experts);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, kept.scalar_type(), "importance", [&] {
    using acc_t = at::opmath_type<scalar_t>;
    const auto* gates_data = kept.const_data_ptr<scalar_t>();
    const auto* index_data = chosen.const_data_ptr<int64_t>();
    sum_over_tokens<acc_t>({0, gates.size(0)}, k, importance,
                           [&](int64_t begin, int64_t end, acc_t* sum) {
                             for (int64_t slot = begin * k; slot < end * k; ++slot) {
                               sum[index_data[slot]] += static_cast<acc_t>(gates_data[slot]);
                             }
                           });
  });
  return importance;
}

}  // namespace
}  // namespace moe_ext::cpu

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) { m.impl("importance", &moe_ext::cpu::importance_cpu); }
