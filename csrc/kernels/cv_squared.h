// CV(values)^2 (Eq. 7) of one vector.
#pragma once

#include "types.h"

namespace moe_ext {

// Adds weight CV(values)^2 to the result of the vectors before.
template <typename scalar_t>
struct CvSquared {
  const scalar_t* values;  // [size]
  int64_t size;
  double weight;
  bool first;                  // the result has no number yet
  acc_type<scalar_t>* result;  // []

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CPU(CvSquared)
MOE_EXT_RUNS_ON_CUDA(CvSquared)

template <typename scalar_t>
struct CvSquaredBackward {
  const acc_type<scalar_t>* grad;  // []
  const scalar_t* values;          // [size]
  int64_t size;
  double weight;
  scalar_t* grad_values;

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CPU(CvSquaredBackward)
MOE_EXT_RUNS_ON_CUDA(CvSquaredBackward)

}  // namespace moe_ext
