#include "../cv_squared.h"

#include "function.h"

namespace moe_ext::autograd {
namespace {

struct WeightedCvSquared : OperatorFunction<WeightedCvSquared, "weighted_cv_squared",
                                            decltype(weighted_cv_squared<Meta>)> {
  static Tensor forward(AutogradContext* ctx, const at::TensorList& values,
                        at::ArrayRef<double> weights) {
    ctx->save_for_backward(values.vec());
    ctx->saved_data["weights"] = weights.vec();
    return call(values, weights);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto weights = ctx->saved_data["weights"].toDoubleVector();
    static const BackwardOperator<decltype(weighted_cv_squared_backward<Meta>)> op(
        "moe_ext::_weighted_cv_squared_backward");
    variable_list out = op.call(grads[0], ctx->get_saved_variables(), weights);
    out.emplace_back();  // weights
    return out;
  }
};

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  moe_ext::autograd::WeightedCvSquared::implement(m);
  m.impl("_weighted_cv_squared_backward", moe_ext::autograd::no_second_derivative());
}
