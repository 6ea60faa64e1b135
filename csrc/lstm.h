// lstm: the checks of its arguments, and its outputs.
#pragma once

#include <vector>

#include "checks.h"
#include "lstm_arguments.h"

namespace moe_ext {

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
