#include "../load.h"

#include "function.h"

namespace moe_ext::autograd {
namespace {

struct Load : OperatorFunction<Load, "load", decltype(load<Meta>)> {
  static Tensor forward(AutogradContext* ctx, const Tensor& clean_logits,
                        const Tensor& noise_stddev, const Tensor& threshold,
                        const Tensor& expert_index, const OptionalTensor& group_offsets) {
    ctx->save_for_backward(
        {clean_logits, noise_stddev, threshold, expert_index, or_undefined(group_offsets)});
    return call(clean_logits, noise_stddev, threshold, expert_index, group_offsets);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    static const BackwardOperator<decltype(load_backward<Meta>)> op("moe_ext::_load_backward");
    const auto [grad_clean, grad_stddev, grad_threshold] =
        op.call(grads[0], saved[0], saved[1], saved[2], saved[3], if_defined(saved[4]));
    return {grad_clean, grad_stddev, grad_threshold, Tensor(), Tensor()};
  }
};

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  moe_ext::autograd::Load::implement(m);
  m.impl("_load_backward", moe_ext::autograd::no_second_derivative());
}
