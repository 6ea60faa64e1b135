// Tensors with torch's negative bit: views such as z.conj().imag, whose memory holds -x.
//
// Torch's fallback handles operators that return a result. It does not handle factored_step_, which
// returns nothing and updates several tensors in place.
#include <torch/library.h>

#include "factored.h"
#include "operator.h"

namespace moe_ext {
namespace {

// Runs the step on copies without the negative bit, then writes the results back.
void factored_step(Tensor& param, const Tensor& grad, Tensor& row, Tensor& column, const Tensor& lr,
                   const Tensor& correction, double decay, double gain, double eps,
                   bool mean_of_roots) {
  // Checked here because a copy never has elements that share memory.
  check_factored_step(param, grad, row, column, lr, correction, decay, gain, eps);
  static const auto op = find_operator<decltype(factored_step)>("moe_ext::factored_step_");
  Tensor p = param.resolve_neg(), r = row.resolve_neg(), c = column.resolve_neg();
  op.call(p, grad.resolve_neg(), r, c, lr.resolve_neg(), correction.resolve_neg(), decay, gain, eps,
          mean_of_roots);
  if (!p.is_same(param)) param.copy_(p);
  if (!r.is_same(row)) row.copy_(r);
  if (!c.is_same(column)) column.copy_(c);
}

}  // namespace
}  // namespace moe_ext

TORCH_LIBRARY_IMPL(moe_ext, Negative, m) { m.impl("factored_step_", &moe_ext::factored_step); }
