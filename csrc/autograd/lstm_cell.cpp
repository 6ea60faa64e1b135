#include "../lstm_cell.h"

#include "function.h"

namespace moe_ext::autograd {
namespace {

struct LstmCellFunction
    : OperatorFunction<LstmCellFunction, "lstm_cell", decltype(lstm_cell<Meta>)> {
  static variable_list forward(AutogradContext* ctx, const Tensor& gates, const Tensor& c_0) {
    ctx->save_for_backward({gates, c_0});
    ctx->set_materialize_grads(false);
    const auto [h, c] = call(gates, c_0);
    return {h, c};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined() && !grads[1].defined()) return {Tensor(), Tensor()};
    const auto saved = ctx->get_saved_variables();
    static const BackwardOperator<decltype(lstm_cell_backward<Meta>)> op(
        "moe_ext::_lstm_cell_backward");
    const auto [grad_gates, grad_c_0] =
        op.call(if_defined(grads[0]), if_defined(grads[1]), saved[0], saved[1]);
    return {grad_gates, grad_c_0};
  }
};

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  moe_ext::autograd::LstmCellFunction::implement(m);
  m.impl("_lstm_cell_backward", moe_ext::autograd::no_second_derivative());
}
