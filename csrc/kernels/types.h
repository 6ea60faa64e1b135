// The types of the numbers that kernels read.
//
// A struct in this folder holds the arguments of one kernel: pointers to contiguous arrays and
// their sizes. Its functions on_cpu and on_cuda run the kernel; cpu/ and cuda/ define them. The
// host function of the operator has checked the arguments.
//
// The kernels of each device are a library of their own, which knows nothing of torch but its types
// of numbers. It exports a function run_on_cpu or run_on_cuda for each struct: the types of torch
// are hidden, and so are members of templates with them.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "export.h"

namespace moe_ext {

// The type of sums and of every value computed from the logits: float for half precision.
template <typename scalar_t>
using acc_type = std::conditional_t<sizeof(scalar_t) == 2, float, scalar_t>;

// A stream of the current CUDA device, on which a kernel runs, and the memory for its intermediate
// results. The caller owns both.
struct CudaStream {
  void* handle;  // a cudaStream_t
  // Returns memory of the device, aligned to 16 bytes, for the kernels that are launched on the
  // stream before run_on_cuda returns.
  void* (*allocate)(void* owner, size_t num_bytes);
  void* owner;

  // Returns an array of `size` elements of T.
  template <typename T>
  T* take(int64_t size) const {
    return static_cast<T*>(allocate(owner, static_cast<size_t>(size) * sizeof(T)));
  }
};

}  // namespace moe_ext

#define MOE_EXT_FOR_EACH_TYPE(macro, Arguments)                                \
  macro(Arguments<float>) macro(Arguments<double>) macro(Arguments<c10::Half>) \
      macro(Arguments<c10::BFloat16>)

// Each declares or defines the function that runs a kernel, for one type or for every type.
#define MOE_EXT_DECLARE_ON_CPU(Arguments) \
  MOE_EXT_KERNEL_API void run_on_cpu(const Arguments& arguments);
#define MOE_EXT_DECLARE_ON_CUDA(Arguments) \
  MOE_EXT_KERNEL_API void run_on_cuda(const Arguments& arguments, const CudaStream& stream);
#define MOE_EXT_DEFINE_ON_CPU(Arguments) \
  void run_on_cpu(const Arguments& arguments) { arguments.on_cpu(); }
#define MOE_EXT_DEFINE_ON_CUDA(Arguments)                                  \
  void run_on_cuda(const Arguments& arguments, const CudaStream& stream) { \
    arguments.on_cuda(stream);                                             \
  }

#define MOE_EXT_RUNS_ON_CPU(Arguments) MOE_EXT_FOR_EACH_TYPE(MOE_EXT_DECLARE_ON_CPU, Arguments)
#define MOE_EXT_RUNS_ON_CUDA(Arguments) MOE_EXT_FOR_EACH_TYPE(MOE_EXT_DECLARE_ON_CUDA, Arguments)
#define MOE_EXT_DEFINE_RUN_ON_CPU(Arguments) MOE_EXT_FOR_EACH_TYPE(MOE_EXT_DEFINE_ON_CPU, Arguments)
#define MOE_EXT_DEFINE_RUN_ON_CUDA(Arguments) \
  MOE_EXT_FOR_EACH_TYPE(MOE_EXT_DEFINE_ON_CUDA, Arguments)
