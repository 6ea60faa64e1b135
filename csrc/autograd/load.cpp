#include "function.h"

namespace moe_ext::autograd {
namespace {

struct Load : torch::autograd::Function<Load> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& clean_logits,
                        const Tensor& noise_stddev, const Tensor& threshold,
                        const Tensor& expert_index, const OptionalTensor& group_offsets) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward(
        {clean_logits, noise_stddev, threshold, expert_index, or_undefined(group_offsets)});
    static const auto op =
        find_operator<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                             const OptionalTensor&)>("moe_ext::load");
    return op.call(clean_logits, noise_stddev, threshold, expert_index, group_offsets);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    static const BackwardOperator<std::tuple<Tensor, Tensor, Tensor>(
        const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
        const OptionalTensor&)>
        op("moe_ext::_load_backward");
    const auto [grad_clean, grad_stddev, grad_threshold] =
        op.call(grads[0], saved[0], saved[1], saved[2], saved[3], if_defined(saved[4]));
    return {grad_clean, grad_stddev, grad_threshold, Tensor(), Tensor()};
  }
};

Tensor load(const Tensor& clean_logits, const Tensor& noise_stddev, const Tensor& threshold,
            const Tensor& expert_index, const OptionalTensor& group_offsets) {
  return Load::apply(clean_logits, noise_stddev, threshold, expert_index, group_offsets);
}

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  moe_ext::autograd::differentiable<"load", &moe_ext::autograd::load>(m);
  m.impl("_load_backward", moe_ext::autograd::no_second_derivative());
}
