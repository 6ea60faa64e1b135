// The cells of one step of an LSTM, whose gates come from the caller.
#pragma once

#include "types.h"

namespace moe_ext {

template <typename scalar_t>
struct LstmCell {
  const scalar_t* gates;  // [B, 4 U]
  const scalar_t* c_0;    // [B, U]
  int64_t num_rows;
  int64_t num_units;
  scalar_t* h;  // [B, U]
  scalar_t* c;  // [B, U]

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CPU(LstmCell)
MOE_EXT_RUNS_ON_CUDA(LstmCell)

// Recomputes the cells.
template <typename scalar_t>
struct LstmCellBackward {
  const scalar_t* grad_h;  // [B, U], or null
  const scalar_t* grad_c;  // [B, U], or null
  const scalar_t* gates;   // [B, 4 U]
  const scalar_t* c_0;     // [B, U]
  int64_t num_rows;
  int64_t num_units;
  scalar_t* grad_gates;
  scalar_t* grad_c_0;

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CPU(LstmCellBackward)
MOE_EXT_RUNS_ON_CUDA(LstmCellBackward)

}  // namespace moe_ext
