// lstm_cell: the checks of its arguments, and its outputs.
#pragma once

#include <tuple>

#include "checks.h"

namespace moe_ext {

inline void check_lstm_cell(const char* op, const Tensor& gates, const Tensor& c_0) {
  check_dim(op, "gates", gates, 2);
  check_floating(op, "gates", gates);
  check_dim(op, "c_0", c_0, 2);
  check_argument(op, "c_0", c_0, gates, gates.scalar_type(), {gates.sym_size(0), c_0.sym_size(1)});
  check_shape(op, "gates", gates, {gates.sym_size(0), 4 * c_0.sym_size(1)});
}

// Creates h and c, or the gradients of the outputs.
inline std::tuple<Tensor, Tensor> lstm_cell_outputs(Empty& empty, const Tensor& c_0) {
  return {empty_of(empty, c_0), empty_of(empty, c_0)};
}

inline void check_lstm_cell_backward(const OptionalTensor& grad_h, const OptionalTensor& grad_c,
                                     const Tensor& gates, const Tensor& c_0) {
  constexpr auto op = "_lstm_cell_backward";
  check_lstm_cell(op, gates, c_0);
  const auto check = [&](const char* name, const OptionalTensor& grad) {
    if (grad) check_argument(op, name, *grad, gates, gates.scalar_type(), c_0.sym_sizes());
  };
  check("grad_h", grad_h);
  check("grad_c", grad_c);
}

// Creates the gradients of gates and c_0.
inline std::tuple<Tensor, Tensor> lstm_cell_gradients(Empty& empty, const Tensor& gates,
                                                      const Tensor& c_0) {
  return {empty_of(empty, gates), empty_of(empty, c_0)};
}

}  // namespace moe_ext
