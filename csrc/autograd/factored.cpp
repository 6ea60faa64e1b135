#include "function.h"

namespace moe_ext::autograd {
namespace {

using Step = void(Tensor&, const Tensor&, Tensor&, Tensor&, const Tensor&, const Tensor&, double,
                  double, double, bool);

const auto& factored_step_op() {
  static const auto op = find_operator<Step>("moe_ext::factored_step_");
  return op;
}

// Rejects tensors that require a gradient: the step has no derivative.
void factored_step(Tensor& param, const Tensor& grad, Tensor& row, Tensor& column, const Tensor& lr,
                   const Tensor& correction, double decay, double gain, double eps,
                   bool mean_of_roots) {
  for (const Tensor& tensor : {param, grad, row, column, lr, correction}) {
    TORCH_CHECK(!at::GradMode::is_enabled() || !tensor.requires_grad(),
                "factored_step_: a tensor that requires a gradient must be used under "
                "torch.no_grad(), got gradients enabled");
  }
  const at::AutoDispatchBelowAutograd guard;
  factored_step_op().call(param, grad, row, column, lr, correction, decay, gain, eps,
                          mean_of_roots);
}

// Bumps the version counters: backward then reports weights that changed after they were saved. The
// ADInplaceOrView key also runs in inference mode; the Autograd key does not.
void factored_step_in_place(Tensor& param, const Tensor& grad, Tensor& row, Tensor& column,
                            const Tensor& lr, const Tensor& correction, double decay, double gain,
                            double eps, bool mean_of_roots) {
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    factored_step_op().call(param, grad, row, column, lr, correction, decay, gain, eps,
                            mean_of_roots);
  }
  for (const Tensor& changed : {param, row, column}) {
    if (!changed.is_inference()) torch::autograd::impl::bump_version(changed);
  }
}

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  m.impl("factored_step_", &moe_ext::autograd::factored_step);
}

TORCH_LIBRARY_IMPL(moe_ext, ADInplaceOrView, m) {
  m.impl("factored_step_", &moe_ext::autograd::factored_step_in_place);
}
