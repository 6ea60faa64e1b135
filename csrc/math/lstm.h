// The cell of an LSTM (App. C.1; Sak et al., 2014) and its derivative, for one unit.
#pragma once

#include "activation.h"

namespace moe_ext::math {

// The gates of a unit after their activations, or the gradients of the gates before them.
template <typename T>
struct LstmGates {
  T i, f, j, o;
};

template <typename T>
struct LstmCell {
  T c;  // the state of the cell
  T r;  // the output before the projection
};

template <typename T>
MOE_EXT_INLINE LstmGates<T> lstm_gates(T i, T f, T j, T o) {
  return {sigmoid(i), sigmoid(f), tanh(j), sigmoid(o)};
}

// c = f c_{t-1} + i j and r = o tanh(c)
template <typename T>
MOE_EXT_INLINE LstmCell<T> lstm_cell(const LstmGates<T>& gates, T previous_c) {
  const T c = std::fma(gates.f, previous_c, gates.i * gates.j);
  return {c, gates.o * tanh(c)};
}

// The gradients of the gates before their activations. The gradient of c without the path through
// r is replaced by the gradient of c_{t-1}; r is recomputed.
template <typename T>
MOE_EXT_INLINE LstmGates<T> lstm_gradient(const LstmGates<T>& gates, T previous_c, T c, T grad_r,
                                          T& grad_c, T& r) {
  const auto [i, f, j, o] = gates;
  const T t = tanh(c);
  r = o * t;
  const T total = std::fma(grad_r * o, std::fma(-t, t, T(1)), grad_c);  // the gradient of c
  grad_c = total * f;
  return {.i = total * j * (i * (T(1) - i)),
          .f = total * previous_c * (f * (T(1) - f)),
          .j = total * i * std::fma(-j, j, T(1)),
          .o = grad_r * t * (o * (T(1) - o))};
}

}  // namespace moe_ext::math
