// The step of factored Adam and Adagrad (App. D).
#pragma once

#include "types.h"

namespace moe_ext {

// A number of the host or, if on_device is not null, of the device.
struct FactoredScalar {
  const double* on_device;
  double on_host;
};

template <typename scalar_t>
struct FactoredStep {
  using acc_t = acc_type<scalar_t>;

  scalar_t* param;       // [M, rows, columns]
  const scalar_t* grad;  // [M, rows, columns]
  acc_t* row;            // [M, rows]
  acc_t* column;         // [M, columns]
  int64_t num_matrices;
  int64_t num_rows;
  int64_t num_columns;
  FactoredScalar lr;
  FactoredScalar correction;
  double decay;
  double gain;
  double eps;
  bool mean_of_roots;

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CPU(FactoredStep)
MOE_EXT_RUNS_ON_CUDA(FactoredStep)

}  // namespace moe_ext
