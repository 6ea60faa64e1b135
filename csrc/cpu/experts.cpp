// The experts' linear layers on the CPU: rows sorted by expert times one matrix per expert.
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <tuple>

#include "../checks.h"
#include "empty_rows.h"

namespace moe_ext::cpu {
namespace {

// Calls body(expert, first_row, num_rows) for every expert.
template <typename Body>
void for_each_expert(const char* op, const Tensor& offsets, int64_t num_rows, const Body& body) {
  const Tensor bounds = offsets.contiguous();
  const auto* bound = bounds.const_data_ptr<int64_t>();
  const int64_t num_experts = bounds.numel() - 1;
  bool ascending = bound[0] == 0 && bound[num_experts] == num_rows;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    ascending = ascending && bound[expert] <= bound[expert + 1];
  }
  TORCH_CHECK_VALUE(ascending, op, ": offsets must ascend from 0 to the number of rows ", num_rows,
                    ", got ", at::IntArrayRef(bound, num_experts + 1));
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    body(expert, bound[expert], bound[expert + 1] - bound[expert]);
  }
}

Tensor grouped_linear_cpu(const Tensor& rows, const Tensor& weight, const OptionalTensor& bias,
                          const Tensor& offsets) {
  check_grouped_linear(rows, weight, bias, offsets);
  Tensor out = empty_rows({rows.size(0), weight.size(2)}, rows.options());
  for_each_expert("grouped_linear", offsets, rows.size(0),
                  [&](int64_t expert, int64_t first, int64_t count) {
                    if (count == 0) return;
                    const Tensor in_e = rows.narrow(0, first, count);
                    Tensor out_e = out.narrow(0, first, count);
                    if (bias) {
                      at::addmm_out(out_e, bias->select(0, expert), in_e, weight.select(0, expert));
                    } else {
                      at::mm_out(out_e, in_e, weight.select(0, expert));
                    }
                  });
  return out;
}

// drows = dout W^T, dW = rows^T dout, dbias = the sum of dout's rows: each written once, in place.
// An expert without rows gets zeros: mm over zero rows writes them.
std::tuple<Tensor, Tensor, Tensor> grouped_linear_backward_cpu(const Tensor& grad_out,
                                                               const Tensor& rows,
                                                               const Tensor& weight,
                                                               const OptionalTensor& bias,
                                                               const Tensor& offsets) {
  check_grouped_linear(rows, weight, bias, offsets);
  check_argument("_grouped_linear_backward", "grad_out", grad_out, rows, rows.scalar_type(),
                 {rows.sym_size(0), weight.sym_size(2)});
  const Tensor grad = grad_out.contiguous();
  Tensor grad_rows = empty_rows(rows.sizes(), rows.options());
  Tensor grad_weight = empty_rows(weight.sizes(), weight.options());
  Tensor grad_bias = at::empty({bias ? weight.size(0) : 0, weight.size(2)}, weight.options());
  for_each_expert("_grouped_linear_backward", offsets, rows.size(0),
                  [&](int64_t expert, int64_t first, int64_t count) {
                    const Tensor grad_e = grad.narrow(0, first, count);
                    Tensor grad_weight_e = grad_weight.select(0, expert);
                    at::mm_out(grad_weight_e, rows.narrow(0, first, count).t(), grad_e);
                    if (count > 0) {
                      Tensor grad_rows_e = grad_rows.narrow(0, first, count);
                      at::mm_out(grad_rows_e, grad_e, weight.select(0, expert).t());
                    }
                    if (bias) {
                      Tensor grad_bias_e = grad_bias.select(0, expert);
                      at::sum_out(grad_bias_e, grad_e, {0});
                    }
                  });
  return {grad_rows, grad_weight, grad_bias};
}

}  // namespace
}  // namespace moe_ext::cpu

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("grouped_linear", &moe_ext::cpu::grouped_linear_cpu);
  m.impl("_grouped_linear_backward", &moe_ext::cpu::grouped_linear_backward_cpu);
}
