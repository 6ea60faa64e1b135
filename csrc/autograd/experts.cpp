#include "function.h"

namespace moe_ext::autograd {
namespace {

struct GroupedLinear : torch::autograd::Function<GroupedLinear> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& rows, const Tensor& weight,
                        const OptionalTensor& bias, const Tensor& offsets) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({rows, weight, or_undefined(bias), offsets});
    static const auto op =
        find_operator<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&)>(
            "moe_ext::grouped_linear");
    return op.call(rows, weight, bias, offsets);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    static const auto op = find_operator<std::tuple<Tensor, Tensor, Tensor>(
        const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&)>(
        "moe_ext::_grouped_linear_backward");
    const auto [grad_rows, grad_weight, grad_bias] =
        op.call(grads[0], saved[0], saved[1], if_defined(saved[2]), saved[3]);
    return {grad_rows, grad_weight, saved[2].defined() ? grad_bias : Tensor(), Tensor()};
  }
};

Tensor grouped_linear(const Tensor& rows, const Tensor& weight, const OptionalTensor& bias,
                      const Tensor& offsets) {
  return GroupedLinear::apply(rows, weight, bias, offsets);
}

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  m.impl("grouped_linear", &moe_ext::autograd::grouped_linear);
  m.impl("_grouped_linear_backward", moe_ext::autograd::no_second_derivative());
}
