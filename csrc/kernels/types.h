// The types of the numbers that kernels read.
//
// A struct in this folder holds the arguments of one kernel: pointers to contiguous arrays and
// their sizes. Its functions on_cpu and on_cuda run the kernel; cpu/ and cuda/ define them. The
// host function of the operator has checked the arguments.
//
// The kernels of the CPU are a library of their own, which knows nothing of torch but its types of
// numbers. It exports a function run_on_cpu for each struct: the types of torch are hidden, and so
// are members of templates with them.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <type_traits>

#include "export.h"

namespace moe_ext {

// The type of sums and of every value computed from the logits: float for half precision.
template <typename scalar_t>
using acc_type = std::conditional_t<sizeof(scalar_t) == 2, float, scalar_t>;

}  // namespace moe_ext

// Declares run_on_cpu for every type.
#define MOE_EXT_RUNS_ON_CPU(Arguments)                                       \
  MOE_EXT_KERNEL_API void run_on_cpu(const Arguments<float>& arguments);     \
  MOE_EXT_KERNEL_API void run_on_cpu(const Arguments<double>& arguments);    \
  MOE_EXT_KERNEL_API void run_on_cpu(const Arguments<c10::Half>& arguments); \
  MOE_EXT_KERNEL_API void run_on_cpu(const Arguments<c10::BFloat16>& arguments);

// Defines them after on_cpu.
#define MOE_EXT_DEFINE_RUN(Arguments)                                            \
  void run_on_cpu(const Arguments<float>& arguments) { arguments.on_cpu(); }     \
  void run_on_cpu(const Arguments<double>& arguments) { arguments.on_cpu(); }    \
  void run_on_cpu(const Arguments<c10::Half>& arguments) { arguments.on_cpu(); } \
  void run_on_cpu(const Arguments<c10::BFloat16>& arguments) { arguments.on_cpu(); }

// Compiles on_cuda, which is defined above, for every type.
#define MOE_EXT_COMPILE_ON_CUDA(Arguments) \
  template struct Arguments<float>;        \
  template struct Arguments<double>;       \
  template struct Arguments<c10::Half>;    \
  template struct Arguments<c10::BFloat16>;
