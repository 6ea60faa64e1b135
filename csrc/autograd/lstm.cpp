#include "../lstm.h"

#include "function.h"

namespace moe_ext::autograd {
namespace {

std::vector<Tensor> call_lstm_backward(const LstmOutputGradients& gradients, const Lstm& lstm,
                                       const LstmSaved& saved, const c10::List<bool>& needs) {
  static const BackwardOperator<decltype(lstm_backward_of<nullptr>)> op("moe_ext::_lstm_backward");
  return op.call(gradients.m, gradients.m_n, gradients.c_n, lstm.x, lstm.weight_input,
                 lstm.weight_recurrent, lstm.projection, lstm.m_0, lstm.c_0, lstm.lengths,
                 lstm.reverse, saved.m, saved.gates, saved.cells, needs);
}

// m, m_n and c_n are differentiable; gates and cells are saved for backward.
struct LstmFunction : torch::autograd::Function<LstmFunction> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight_input,
                               const Tensor& weight_recurrent, const OptionalTensor& bias,
                               const OptionalTensor& projection, const OptionalTensor& m_0,
                               const OptionalTensor& c_0, const OptionalTensor& lengths,
                               bool reverse) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [m, m_n, c_n, gates, cells] = lstm_of<call_lstm>(
        x, weight_input, weight_recurrent, bias, projection, m_0, c_0, lengths, reverse);
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
    const OptionalTensor grad_m = if_defined(grads[0]), grad_m_n = if_defined(grads[1]),
                         grad_c_n = if_defined(grads[2]);
    const OptionalTensor projection = if_defined(saved[3]), m_0 = if_defined(saved[4]),
                         c_0 = if_defined(saved[5]), lengths = if_defined(saved[6]);
    const auto gradients =
        call_lstm_backward({.m = grad_m, .m_n = grad_m_n, .c_n = grad_c_n},
                           {.x = saved[0],
                            .weight_input = saved[1],
                            .weight_recurrent = saved[2],
                            .bias = std::nullopt,
                            .projection = projection,
                            .m_0 = m_0,
                            .c_0 = c_0,
                            .lengths = lengths,
                            .reverse = ctx->saved_data["reverse"].toBool()},
                           {.m = saved[7], .gates = saved[8], .cells = saved[9]}, needs);
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (needs[i]) results[i] = gradients[i];
    }
    return results;
  }
};

LstmOutputs lstm(const Lstm& lstm) {
  const auto out =
      LstmFunction::apply(lstm.x, lstm.weight_input, lstm.weight_recurrent, lstm.bias,
                          lstm.projection, lstm.m_0, lstm.c_0, lstm.lengths, lstm.reverse);
  return {out[0], out[1], out[2], out[3], out[4]};
}

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  moe_ext::autograd::differentiable<"lstm", &moe_ext::lstm_of<moe_ext::autograd::lstm>>(m);
  m.impl("_lstm_backward", moe_ext::autograd::no_second_derivative());
}
