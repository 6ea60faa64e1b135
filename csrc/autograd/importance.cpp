#include "../importance.h"

#include "function.h"

namespace moe_ext::autograd {
namespace {

// Importance is linear: the gradient of a gate is the gradient of its expert's importance. The load
// does not depend on the gates.
struct Importance : torch::autograd::Function<Importance> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& gates,
                               const Tensor& expert_index, const c10::SymInt& num_experts,
                               bool with_load) {
    ctx->save_for_backward({expert_index});
    ctx->saved_data["gates_type"] = gates.scalar_type();
    if (!with_load) {
      return {BelowAutograd<"importance", decltype(moe_ext::importance<Meta>)>::call(
          gates, expert_index, num_experts)};
    }
    auto [importance, load] =
        BelowAutograd<"importance_and_load", decltype(moe_ext::importance_and_load<Meta>)>::call(
            gates, expert_index, num_experts);
    ctx->mark_non_differentiable({load});
    return {importance, load};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto expert_index = ctx->get_saved_variables()[0];
    const auto grad_gates =
        grads[0].index_select(0, expert_index.flatten()).view_symint(expert_index.sym_sizes());
    return {grad_gates.to(ctx->saved_data["gates_type"].toScalarType()), Tensor(), Tensor(),
            Tensor()};
  }
};

Tensor importance(const Tensor& gates, const Tensor& expert_index, c10::SymInt num_experts) {
  return Importance::apply(gates, expert_index, num_experts, /*with_load=*/false)[0];
}

std::tuple<Tensor, Tensor> importance_and_load(const Tensor& gates, const Tensor& expert_index,
                                               c10::SymInt num_experts) {
  const auto out = Importance::apply(gates, expert_index, num_experts, /*with_load=*/true);
  return {out[0], out[1]};
}

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  moe_ext::autograd::differentiable<"importance", &moe_ext::autograd::importance>(m);
  moe_ext::autograd::differentiable<"importance_and_load", &moe_ext::autograd::importance_and_load>(
      m);
}
