#include "../dispatch.h"

#include "function.h"

namespace moe_ext::autograd {
namespace {

struct Dispatch : OperatorFunction<Dispatch, "dispatch", decltype(dispatch<Meta>)> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& inverse,
                        const OptionalTensor& token_offsets) {
    ctx->save_for_backward({inverse, or_undefined(token_offsets)});
    return call(x, inverse, token_offsets);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    static const BackwardOperator<decltype(dispatch_backward<Meta>)> op(
        "moe_ext::_dispatch_backward");
    return {op.call(grads[0], saved[0], if_defined(saved[1])), Tensor(), Tensor()};
  }
};

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  m.impl("dispatch_plan", torch::CppFunction::makeFallthrough());  // no floating-point inputs
  moe_ext::autograd::Dispatch::implement(m);
  m.impl("_dispatch_backward", moe_ext::autograd::no_second_derivative());
}
