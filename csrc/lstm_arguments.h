// The arguments of lstm and _lstm_backward: as structs and as the dispatcher passes them.
#pragma once

#include <ATen/core/List.h>

#include <tuple>
#include <vector>

#include "find_operator.h"
#include "tensor.h"

namespace moe_ext {

// The inputs and the weights: B sentences of at most S tokens, U units, outputs of width P.
struct Lstm {
  const Tensor& x;                   // [B, S, D]
  const Tensor& weight_input;        // [4 U, D], in the order i, f, j, o
  const Tensor& weight_recurrent;    // [4 U, P]
  const OptionalTensor& bias;        // [4 U]
  const OptionalTensor& projection;  // [P, U]; without it, P is U
  const OptionalTensor& m_0;         // [B, P]
  const OptionalTensor& c_0;         // [B, U]
  const OptionalTensor& lengths;     // [B]
  bool reverse;

  c10::SymInt num_sentences() const { return x.sym_size(0); }
  c10::SymInt num_units() const { return weight_input.sym_size(0) / 4; }
  c10::SymInt width() const { return weight_recurrent.sym_size(1); }
};

// The gradients of the outputs, or none.
struct LstmOutputGradients {
  const OptionalTensor& m;
  const OptionalTensor& m_n;
  const OptionalTensor& c_n;
};

// What the forward pass saves for the backward pass.
struct LstmSaved {
  const Tensor& m;
  const Tensor& gates;
  const Tensor& cells;
};

// m, m_n, c_n, gates and cells.
using LstmOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// The arguments that have a gradient, in the order of `needs`.
enum LstmArgument { kX, kWeightInput, kWeightRecurrent, kBias, kProjection, kM0, kC0, kNumNeeds };

// Adapts kernel(lstm) to the dispatcher.
template <auto kernel>
LstmOutputs lstm_of(const Tensor& x, const Tensor& weight_input, const Tensor& weight_recurrent,
                    const OptionalTensor& bias, const OptionalTensor& projection,
                    const OptionalTensor& m_0, const OptionalTensor& c_0,
                    const OptionalTensor& lengths, bool reverse) {
  return kernel(Lstm{.x = x,
                     .weight_input = weight_input,
                     .weight_recurrent = weight_recurrent,
                     .bias = bias,
                     .projection = projection,
                     .m_0 = m_0,
                     .c_0 = c_0,
                     .lengths = lengths,
                     .reverse = reverse});
}

// Adapts kernel(gradients, lstm, saved, needs) to the dispatcher. The lstm has no bias.
template <auto kernel>
std::vector<Tensor> lstm_backward_of(const OptionalTensor& grad_m, const OptionalTensor& grad_m_n,
                                     const OptionalTensor& grad_c_n, const Tensor& x,
                                     const Tensor& weight_input, const Tensor& weight_recurrent,
                                     const OptionalTensor& projection, const OptionalTensor& m_0,
                                     const OptionalTensor& c_0, const OptionalTensor& lengths,
                                     bool reverse, const Tensor& m, const Tensor& gates,
                                     const Tensor& cells, const c10::List<bool>& needs) {
  return kernel({.m = grad_m, .m_n = grad_m_n, .c_n = grad_c_n},
                Lstm{.x = x,
                     .weight_input = weight_input,
                     .weight_recurrent = weight_recurrent,
                     .bias = std::nullopt,
                     .projection = projection,
                     .m_0 = m_0,
                     .c_0 = c_0,
                     .lengths = lengths,
                     .reverse = reverse},
                {.m = m, .gates = gates, .cells = cells}, needs);
}

// Calls the operator through the dispatcher.
inline LstmOutputs call_lstm(const Lstm& lstm) {
  static const PublicOperator<decltype(lstm_of<nullptr>)> op("moe_ext::lstm");
  return op.call(lstm.x, lstm.weight_input, lstm.weight_recurrent, lstm.bias, lstm.projection,
                 lstm.m_0, lstm.c_0, lstm.lengths, lstm.reverse);
}

}  // namespace moe_ext
