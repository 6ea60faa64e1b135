// lstm: its arguments as the dispatcher passes them, their checks, and its outputs.
#pragma once

#include <ATen/core/List.h>

#include <tuple>
#include <utility>
#include <vector>

#include "checks.h"
#include "find_operator.h"

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

inline void check_lstm(const char* op, const Lstm& lstm) {
  check_dim(op, "x", lstm.x, 3);
  check_floating(op, "x", lstm.x);
  check_dim(op, "weight_input", lstm.weight_input, 2);
  check_dim(op, "weight_recurrent", lstm.weight_recurrent, 2);
  TORCH_CHECK_VALUE(lstm.weight_input.sym_size(0) % 4 == 0, op,
                    ": weight_input must have 4 rows for each unit, got shape ",
                    lstm.weight_input.sym_sizes());
  const auto units = lstm.num_units();
  const auto width = lstm.projection ? lstm.width() : units;
  const auto sentences = lstm.num_sentences();
  const auto check = [&](const char* name, const Tensor& tensor, c10::SymIntArrayRef shape) {
    check_argument(op, name, tensor, lstm.x, lstm.x.scalar_type(), shape);
  };
  check("weight_input", lstm.weight_input, {4 * units, lstm.x.sym_size(2)});
  check("weight_recurrent", lstm.weight_recurrent, {4 * units, width});
  if (lstm.bias) check("bias", *lstm.bias, {4 * units});
  if (lstm.projection) check("projection", *lstm.projection, {width, units});
  if (lstm.m_0) check("m_0", *lstm.m_0, {sentences, width});
  if (lstm.c_0) check("c_0", *lstm.c_0, {sentences, units});
  if (lstm.lengths) check_index(op, "lengths", *lstm.lengths, lstm.x, {sentences});
}

inline LstmOutputs lstm_outputs(Empty& empty, const Lstm& lstm) {
  const auto& x = lstm.x;
  const auto sentences = lstm.num_sentences(), tokens = x.sym_size(1);
  const auto units = lstm.num_units(), width = lstm.width();
  const auto type = x.scalar_type(), acc_type = accumulate_type(x);
  return {empty(x, {sentences, tokens, width}, type), empty(x, {sentences, width}, type),
          empty(x, {sentences, units}, type), empty(x, {sentences, tokens, 4 * units}, acc_type),
          empty(x, {sentences, tokens, units}, acc_type)};
}

inline void check_lstm_backward(const LstmOutputGradients& gradients, const Lstm& lstm,
                                const LstmSaved& saved, const c10::List<bool>& needs) {
  constexpr auto op = "_lstm_backward";
  check_lstm(op, lstm);
  const auto& x = lstm.x;
  const auto sentences = lstm.num_sentences(), tokens = x.sym_size(1);
  const auto units = lstm.num_units(), width = lstm.width();
  const auto type = x.scalar_type(), acc_type = accumulate_type(x);
  if (gradients.m) check_argument(op, "grad_m", *gradients.m, x, type, {sentences, tokens, width});
  if (gradients.m_n) check_argument(op, "grad_m_n", *gradients.m_n, x, type, {sentences, width});
  if (gradients.c_n) check_argument(op, "grad_c_n", *gradients.c_n, x, type, {sentences, units});
  check_argument(op, "m", saved.m, x, type, {sentences, tokens, width});
  check_argument(op, "gates", saved.gates, x, acc_type, {sentences, tokens, 4 * units});
  check_argument(op, "cells", saved.cells, x, acc_type, {sentences, tokens, units});
  TORCH_CHECK_VALUE(needs.size() == kNumNeeds, op, ": needs must have ", int{kNumNeeds},
                    " values, got ", needs.size());
  TORCH_CHECK_VALUE(lstm.projection || !needs[kProjection], op,
                    ": needs must be false for the projection if there is none, got true");
}

// Creates the gradients in the order of LstmArgument. A gradient that is not needed has shape [0].
inline std::vector<Tensor> lstm_gradients(Empty& empty, const Lstm& lstm,
                                          const c10::List<bool>& needs) {
  const auto& x = lstm.x;
  const auto sentences = lstm.num_sentences(), units = lstm.num_units(), width = lstm.width();
  std::vector<Tensor> gradients;
  const auto type = x.scalar_type();
  const auto add = [&](c10::SymIntArrayRef shape) {
    const bool needed = needs[gradients.size()];
    gradients.push_back(needed ? empty(x, shape, type) : empty(x, {0}, type));
  };
  add(x.sym_sizes());
  add({4 * units, x.sym_size(2)});
  add({4 * units, width});
  add({4 * units});
  add({width, units});
  add({sentences, width});
  add({sentences, units});
  return gradients;
}

}  // namespace moe_ext
