#include "../gating.h"

#include "function.h"

namespace moe_ext::autograd {
namespace {

// gates, threshold and noise_stddev are differentiable in clean_logits and raw_noise_stddev. The
// noise is a constant: it does not depend on any parameter.
struct NoisyTopKGating
    : OperatorFunction<NoisyTopKGating, "noisy_topk_gating", decltype(noisy_topk_gating<Meta>)> {
  static variable_list forward(AutogradContext* ctx, const Tensor& clean_logits,
                               const OptionalTensor& raw_noise_stddev, const OptionalTensor& noise,
                               const c10::SymInt& k, double noise_epsilon) {
    const auto [gates, expert_index, threshold, threshold_index, noise_stddev] =
        call(clean_logits, raw_noise_stddev, noise, k, noise_epsilon);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({gates, expert_index, threshold_index, clean_logits,
                            or_undefined(raw_noise_stddev), or_undefined(noise)});
    return {gates, expert_index, threshold, threshold_index, noise_stddev};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    static const BackwardOperator<decltype(noisy_topk_gating_backward<Meta>)> op(
        "moe_ext::_noisy_topk_gating_backward");
    const auto [grad_clean, grad_raw] =
        op.call(if_defined(grads[0]), if_defined(grads[2]), if_defined(grads[4]), saved[0],
                saved[1], saved[2], saved[3], if_defined(saved[4]), if_defined(saved[5]));
    return {grad_clean, saved[5].defined() ? grad_raw : Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  moe_ext::autograd::NoisyTopKGating::implement(m);
  m.impl("_noisy_topk_gating_backward", moe_ext::autograd::no_second_derivative());
}
