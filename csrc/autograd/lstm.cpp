#include "../lstm_arguments.h"
#include "function.h"

namespace moe_ext::autograd {
namespace {

// m, m_n and c_n are differentiable; gates and cells are saved for backward.
struct LstmFunction : OperatorFunction<LstmFunction, "lstm", decltype(lstm_of<nullptr>)> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight_input,
                               const Tensor& weight_recurrent, const OptionalTensor& bias,
                               const OptionalTensor& projection, const OptionalTensor& m_0,
                               const OptionalTensor& c_0, const OptionalTensor& lengths,
                               bool reverse) {
    const auto [m, m_n, c_n, gates, cells] =
        call(x, weight_input, weight_recurrent, bias, projection, m_0, c_0, lengths, reverse);
    const auto needs = [](const OptionalTensor& each) { return each && each->requires_grad(); };
    ctx->saved_data["needs"] =
        c10::List<bool>({needs(x), needs(weight_input), needs(weight_recurrent), needs(bias),
                         needs(projection), needs(m_0), needs(c_0)});
    ctx->saved_data["reverse"] = reverse;
    ctx->save_for_backward({x, weight_input, weight_recurrent, or_undefined(projection),
                            or_undefined(m_0), or_undefined(c_0), or_undefined(lengths), m, gates,
                            cells});
    ctx->mark_non_differentiable({gates, cells});
    ctx->set_materialize_grads(false);
    return {m, m_n, c_n, gates, cells};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    constexpr size_t kInputs = 9;
    variable_list results(kInputs);
    if (!grads[0].defined() && !grads[1].defined() && !grads[2].defined()) return results;
    const auto saved = ctx->get_saved_variables();
    const auto needs = ctx->saved_data["needs"].toBoolList();
    static const BackwardOperator<decltype(lstm_backward_of<nullptr>)> op(
        "moe_ext::_lstm_backward");
    const auto gradients =
        op.call(if_defined(grads[0]), if_defined(grads[1]), if_defined(grads[2]), saved[0],
                saved[1], saved[2], if_defined(saved[3]), if_defined(saved[4]),
                if_defined(saved[5]), if_defined(saved[6]), ctx->saved_data["reverse"].toBool(),
                saved[7], saved[8], saved[9], needs);
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (needs[i]) results[i] = gradients[i];
    }
    return results;
  }
};

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  moe_ext::autograd::LstmFunction::implement(m);
  m.impl("_lstm_backward", moe_ext::autograd::no_second_derivative());
}
