#include "call.h"

namespace moe_ext::autograd {
namespace {

struct Combine : torch::autograd::Function<Combine> {
  static Tensor forward(AutogradContext* ctx, const Tensor& expert_output, const Tensor& gates,
                        const Tensor& inverse) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({expert_output, gates, inverse});
    return call<Tensor(const Tensor&, const Tensor&, const Tensor&)>("moe_ext::combine",
                                                                     expert_output, gates, inverse);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [grad_expert_output, grad_gates] = call<std::tuple<Tensor, Tensor>(
        const Tensor&, const Tensor&, const Tensor&, const Tensor&)>(
        "moe_ext::_combine_backward", grads[0], saved[0], saved[1], saved[2]);
    return {grad_expert_output, grad_gates, Tensor()};
  }
};

Tensor combine(const Tensor& expert_output, const Tensor& gates, const Tensor& inverse) {
  return Combine::apply(expert_output, gates, inverse);
}

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  m.impl("combine", &moe_ext::autograd::combine);
  m.impl("_combine_backward", moe_ext::autograd::no_second_derivative());
}
