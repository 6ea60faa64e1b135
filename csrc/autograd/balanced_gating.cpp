#include "../balanced_gating.h"

#include "function.h"

namespace moe_ext::autograd {
namespace {

struct SelectedSoftmax
    : OperatorFunction<SelectedSoftmax, "selected_softmax", decltype(selected_softmax<Meta>)> {
  static Tensor forward(AutogradContext* ctx, const Tensor& logits, const Tensor& expert_index,
                        const Tensor& token_offsets) {
    const auto gates = call(logits, expert_index, token_offsets);
    // The gradient depends on the gates, not on the logits.
    ctx->save_for_backward({gates, expert_index, token_offsets});
    ctx->saved_data["num_experts"] = logits.sym_size(1);
    ctx->saved_data["logits_type"] = logits.scalar_type();
    return gates;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    static const BackwardOperator<decltype(selected_softmax_backward<Meta>)> op(
        "moe_ext::_selected_softmax_backward");
    const auto grad_logits =
        op.call(grads[0], saved[0], saved[1], saved[2], ctx->saved_data["num_experts"].toSymInt());
    return {grad_logits.to(ctx->saved_data["logits_type"].toScalarType()), Tensor(), Tensor()};
  }
};

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  m.impl("batchwise_topm", torch::CppFunction::makeFallthrough());  // no derivative
  moe_ext::autograd::SelectedSoftmax::implement(m);
  m.impl("_selected_softmax_backward", moe_ext::autograd::no_second_derivative());
}
