#include "../combine.h"

#include "function.h"

namespace moe_ext::autograd {
namespace {

struct Combine : OperatorFunction<Combine, "combine", decltype(combine<Meta>)> {
  static Tensor forward(AutogradContext* ctx, const Tensor& expert_output, const Tensor& gates,
                        const Tensor& inverse, const OptionalTensor& token_offsets) {
    ctx->save_for_backward({expert_output, gates, inverse, or_undefined(token_offsets)});
    return call(expert_output, gates, inverse, token_offsets);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    static const BackwardOperator<decltype(combine_backward<Meta>)> op(
        "moe_ext::_combine_backward");
    const auto [grad_expert_output, grad_gates] =
        op.call(grads[0], saved[0], saved[1], saved[2], if_defined(saved[3]));
    return {grad_expert_output, grad_gates, Tensor(), Tensor()};
  }
};

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  moe_ext::autograd::Combine::implement(m);
  m.impl("_combine_backward", moe_ext::autograd::no_second_derivative());
}
