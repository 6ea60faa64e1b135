// The types of the numbers that kernels read.
//
// A struct in this folder holds the arguments of one kernel: pointers to contiguous arrays and
// their sizes. Its functions on_cpu and on_cuda run the kernel; cpu/ and cuda/ define them. The
// host function of the operator has checked the arguments.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <type_traits>

namespace moe_ext {

// The type of sums and of every value computed from the logits: float for half precision.
template <typename scalar_t>
using acc_type = std::conditional_t<sizeof(scalar_t) == 2, float, scalar_t>;

}  // namespace moe_ext

// Compiles the functions of a struct that are defined above, for every type.
#define MOE_EXT_FOR_EACH_TYPE(Arguments) \
  template struct Arguments<float>;      \
  template struct Arguments<double>;     \
  template struct Arguments<c10::Half>;  \
  template struct Arguments<c10::BFloat16>;
