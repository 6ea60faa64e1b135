#include "function.h"

namespace moe_ext::autograd {
namespace {

struct Dispatch : torch::autograd::Function<Dispatch> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& inverse) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({inverse});
    static const auto op = find_operator<Tensor(const Tensor&, const Tensor&)>("moe_ext::dispatch");
    return op.call(x, inverse);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto inverse = ctx->get_saved_variables()[0];
    static const auto op =
        find_operator<Tensor(const Tensor&, const Tensor&)>("moe_ext::_dispatch_backward");
    return {op.call(grads[0], inverse), Tensor()};
  }
};

Tensor dispatch(const Tensor& x, const Tensor& inverse) { return Dispatch::apply(x, inverse); }

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  m.impl("dispatch_plan", torch::CppFunction::makeFallthrough());  // integers in, integers out
  m.impl("dispatch", &moe_ext::autograd::dispatch);
  m.impl("_dispatch_backward", moe_ext::autograd::no_second_derivative());
}
