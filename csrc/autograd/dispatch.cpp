#include "function.h"

namespace moe_ext::autograd {
namespace {

using Signature = Tensor(const Tensor&, const Tensor&, const OptionalTensor&);

struct Dispatch : torch::autograd::Function<Dispatch> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& inverse,
                        const OptionalTensor& token_offsets) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({inverse, or_undefined(token_offsets)});
    static const auto op = find_operator<Signature>("moe_ext::dispatch");
    return op.call(x, inverse, token_offsets);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    static const BackwardOperator<Signature> op("moe_ext::_dispatch_backward");
    return {op.call(grads[0], saved[0], if_defined(saved[1])), Tensor(), Tensor()};
  }
};

Tensor dispatch(const Tensor& x, const Tensor& inverse, const OptionalTensor& token_offsets) {
  return Dispatch::apply(x, inverse, token_offsets);
}

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  m.impl("dispatch_plan", torch::CppFunction::makeFallthrough());  // no floating-point inputs
  moe_ext::autograd::differentiable<"dispatch", &moe_ext::autograd::dispatch>(m);
  m.impl("_dispatch_backward", moe_ext::autograd::no_second_derivative());
}
