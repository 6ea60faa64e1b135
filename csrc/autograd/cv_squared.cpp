#include "function.h"

namespace moe_ext::autograd {
namespace {

struct WeightedCvSquared : torch::autograd::Function<WeightedCvSquared> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const at::TensorList& values,
                        at::ArrayRef<double> weights) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward(values.vec());
    ctx->saved_data["weights"] = weights.vec();
    static const auto op =
        find_operator<Tensor(at::TensorList, at::ArrayRef<double>)>("moe_ext::weighted_cv_squared");
    return op.call(values, weights);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto weights = ctx->saved_data["weights"].toDoubleVector();
    static const BackwardOperator<std::vector<Tensor>(const Tensor&, at::TensorList,
                                                      at::ArrayRef<double>)>
        op("moe_ext::_weighted_cv_squared_backward");
    variable_list out = op.call(grads[0], ctx->get_saved_variables(), weights);
    out.emplace_back();  // weights
    return out;
  }
};

Tensor weighted_cv_squared(at::TensorList values, at::ArrayRef<double> weights) {
  return WeightedCvSquared::apply(values, weights);
}

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  moe_ext::autograd::differentiable<"weighted_cv_squared", &moe_ext::autograd::weighted_cv_squared>(
      m);
  m.impl("_weighted_cv_squared_backward", moe_ext::autograd::no_second_derivative());
}
