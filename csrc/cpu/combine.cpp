// y_t = sum_j G(x_t)_j E_j(x_t) (Eq. 1) on the CPU, gathered through the inverse permutation.
#include "../combine.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <tuple>

#include "../implement.h"
#include "empty_rows.h"
#include "parallel.h"
#include "slots.h"
#include "vectorize.h"

namespace moe_ext::cpu {
namespace {

Tensor combine_cpu(const Tensor& expert_output, const Tensor& gates, const Tensor& inverse,
                   const OptionalTensor& token_offsets) {
  check_combine("combine", expert_output, gates, inverse, token_offsets);
  const Slots slots("combine", inverse, token_offsets);
  Tensor y = combine_output(empty, expert_output, inverse, token_offsets);
  sum_of_rows(expert_output.contiguous(), slots,
              gates.to(accumulate_type(expert_output)).contiguous(), y);
  return y;
}

// dE_j = G_j dy and dG_j = <dy, E_j> for one assignment; reads each element once.
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
                                                const Tensor& gates, const Tensor& inverse,
                                                const OptionalTensor& token_offsets) {
  check_combine_backward(grad_y, expert_output, gates, inverse, token_offsets);
  const Slots slots("_combine_backward", inverse, token_offsets);
  const int64_t width = expert_output.size(1);
  const Tensor grad = grad_y.contiguous();
  const Tensor rows = expert_output.contiguous();
  const Tensor weights = gates.to(accumulate_type(rows)).contiguous();
  const auto [grad_rows, grad_weights] = combine_gradients(empty, rows, weights);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, rows.scalar_type(), "combine_backward", [&] {
        using acc_t = at::opmath_type<scalar_t>;
        const auto* grad_data = grad.const_data_ptr<scalar_t>();
        const auto* rows_data = rows.const_data_ptr<scalar_t>();
        const auto* weights_data = weights.const_data_ptr<acc_t>();
        auto* grad_rows_data = grad_rows.mutable_data_ptr<scalar_t>();
        auto* grad_weights_data = grad_weights.mutable_data_ptr<acc_t>();
        slots.for_tokens(2 * width, [&](int64_t begin, int64_t end) {
          for (int64_t t = begin; t < end; ++t) {
            for (int64_t slot = slots.begin(t); slot < slots.end(t); ++slot) {
              const int64_t row = slots.row(slot) * width;
              vectorized<ScaleAndDot>(weights_data[slot], grad_data + t * width, rows_data + row,
                                      width, grad_rows_data + row, grad_weights_data + slot);
            }
          }
        });
      });
  return {grad_rows, grad_weights.to(gates.scalar_type())};
}

}  // namespace
}  // namespace moe_ext::cpu

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  moe_ext::implement<"combine", &moe_ext::cpu::combine_cpu>(m);
  moe_ext::implement<"_combine_backward", &moe_ext::cpu::combine_backward_cpu>(m);
}
