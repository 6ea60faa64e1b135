#include "../topk_routing.h"

#include "function.h"

namespace moe_ext::autograd {
namespace {

// gates are differentiable in logits. The bias only takes part in the selection, which has no
// gradient.
struct TopKRouting : OperatorFunction<TopKRouting, "topk_routing", decltype(topk_routing<Meta>)> {
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const c10::SymInt& k,
                               const OptionalTensor& bias, std::string_view score, bool renormalize,
                               double scale, const c10::SymInt& num_groups,
                               const c10::SymInt& groups_per_token,
                               const c10::SymInt& group_score_k, const OptionalTensor& given) {
    const auto [gates, expert_index] = call(logits, k, bias, score, renormalize, scale, num_groups,
                                            groups_per_token, group_score_k, given);
    ctx->save_for_backward({logits, expert_index});
    ctx->saved_data["score"] = std::string(score);
    ctx->saved_data["renormalize"] = renormalize;
    ctx->saved_data["scale"] = scale;
    return {gates, expert_index};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    static const BackwardOperator<decltype(topk_routing_backward<Meta>)> op(
        "moe_ext::_topk_routing_backward");
    const auto grad_logits =
        op.call(grads[0], saved[0], saved[1], ctx->saved_data["score"].toStringRef(),
                ctx->saved_data["renormalize"].toBool(), ctx->saved_data["scale"].toDouble());
    variable_list gradients(10);
    gradients[0] = grad_logits;
    return gradients;
  }
};

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  moe_ext::autograd::TopKRouting::implement(m);
  m.impl("_topk_routing_backward", moe_ext::autograd::no_second_derivative());
}
