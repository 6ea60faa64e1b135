// y_t = sum_j G(x_t)_j E_j(x_t) (Eq. 1) on the CPU, gathered through the inverse permutation.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <tuple>

#include "../checks.h"
#include "empty_rows.h"
#include "parallel.h"
#include "row_sum.h"
#include "vectorize.h"

namespace moe_ext::cpu {
namespace {

Tensor combine_cpu(const Tensor& expert_output, const Tensor& gates, const Tensor& inverse) {
  check_combine(expert_output, gates, inverse);
  const Tensor row_of = inverse.contiguous();
  check_permutation("combine", "inverse", row_of);
  return sum_of_rows(expert_output.contiguous(), row_of,
                     gates.to(accumulate_type(expert_output)).contiguous());
}

// dE_j = G_j dy and dG_j = <dy, E_j> for one choice, each element read once.
struct ScaleAndDot {
  template <typename scalar_t, typename acc_t>
  MOE_EXT_KERNEL void run(acc_t gate, const scalar_t* grad_y, const scalar_t* row, int64_t size,
                          scalar_t* grad_row, acc_t* grad_gate) {
    *grad_gate = sum_of_terms<acc_t>(
        size, [&](int64_t d, acc_t partial) __attribute__((always_inline)) {
          const acc_t grad = static_cast<acc_t>(grad_y[d]);
          grad_row[d] = static_cast<scalar_t>(gate * grad);
          return std::fma(grad, static_cast<acc_t>(row[d]), partial);
        });
  }
};

std::tuple<Tensor, Tensor> combine_backward_cpu(const Tensor& grad_y, const Tensor& expert_output,
                                                const Tensor& gates, const Tensor& inverse) {
  check_combine(expert_output, gates, inverse);
  check_argument("_combine_backward", "grad_y", grad_y, expert_output, expert_output.scalar_type(),
                 {gates.sym_size(0), expert_output.sym_size(1)});
  const int64_t num_tokens = gates.size(0);
  const int64_t k = gates.size(1);
  const int64_t width = expert_output.size(1);
  const Tensor grad = grad_y.contiguous();
  const Tensor rows = expert_output.contiguous();
  const Tensor weights = gates.to(accumulate_type(rows)).contiguous();
  const Tensor row_of = inverse.contiguous();
  check_permutation("_combine_backward", "inverse", row_of);
  Tensor grad_rows = empty_rows(rows.sizes(), rows.options());
  Tensor grad_weights = at::empty(weights.sizes(), weights.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, rows.scalar_type(), "combine_backward", [&] {
        using acc_t = at::opmath_type<scalar_t>;
        const auto* grad_data = grad.const_data_ptr<scalar_t>();
        const auto* rows_data = rows.const_data_ptr<scalar_t>();
        const auto* weights_data = weights.const_data_ptr<acc_t>();
        const auto* row_data = row_of.const_data_ptr<int64_t>();
        auto* grad_rows_data = grad_rows.mutable_data_ptr<scalar_t>();
        auto* grad_weights_data = grad_weights.mutable_data_ptr<acc_t>();
        parallel_for(num_tokens, 2 * k * width, [&](int64_t begin, int64_t end) {
          for (int64_t slot = begin * k; slot < end * k; ++slot) {
            const int64_t row = row_data[slot] * width;
            vectorized<ScaleAndDot>(weights_data[slot], grad_data + slot / k * width,
                                    rows_data + row, width, grad_rows_data + row,
                                    grad_weights_data + slot);
          }
        });
      });
  return {grad_rows, grad_weights.to(gates.scalar_type())};
}

}  // namespace
}  // namespace moe_ext::cpu

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("combine", &moe_ext::cpu::combine_cpu);
  m.impl("_combine_backward", &moe_ext::cpu::combine_backward_cpu);
}
