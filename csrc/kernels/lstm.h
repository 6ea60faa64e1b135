// An LSTM with or without a projection.
#pragma once

#include "types.h"

namespace moe_ext {

// B sentences of at most S tokens [D], U units, outputs of width P; see lstm.h.
template <typename scalar_t>
struct LstmLayer {
  const scalar_t* x;                 // [B, S, D]
  const scalar_t* weight_input;      // [4 U, D]
  const scalar_t* weight_recurrent;  // [4 U, P]
  const scalar_t* bias;              // [4 U], or null
  const scalar_t* projection;        // [P, U], or null: P is U
  const scalar_t* m_0;               // [B, P], or null
  const scalar_t* c_0;               // [B, U], or null
  const int64_t* lengths;            // [B], or null: S
  bool reverse;
  int64_t num_sentences, num_tokens, d_input, num_units, width;
};

template <typename scalar_t>
struct LstmForward {
  using acc_t = acc_type<scalar_t>;

  LstmLayer<scalar_t> layer;
  scalar_t* m;    // [B, S, P]
  scalar_t* m_n;  // [B, P]
  scalar_t* c_n;  // [B, U]
  acc_t* gates;   // [B, S, 4 U], in an order of the kernel
  acc_t* cells;   // [B, S, U], in an order of the kernel

  void on_cpu() const;
};
MOE_EXT_RUNS_ON_CPU(LstmForward)

// A gradient is null if it is not needed.
template <typename scalar_t>
struct LstmBackward {
  using acc_t = acc_type<scalar_t>;

  LstmLayer<scalar_t> layer;
  const scalar_t* grad_m;    // [B, S, P], or null
  const scalar_t* grad_m_n;  // [B, P], or null
  const scalar_t* grad_c_n;  // [B, U], or null
  const scalar_t* m;         // what forward returned
  const acc_t* gates;
  const acc_t* cells;
  scalar_t* grad_x;
  scalar_t* grad_weight_input;
  scalar_t* grad_weight_recurrent;
  scalar_t* grad_bias;
  scalar_t* grad_projection;
  scalar_t* grad_m_0;
  scalar_t* grad_c_0;

  void on_cpu() const;
};
MOE_EXT_RUNS_ON_CPU(LstmBackward)

}  // namespace moe_ext
