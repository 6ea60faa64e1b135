// The devices of the operators. The host function of an operator is a template of one of them. It
// checks the arguments, creates the outputs, and runs the kernel with a struct of kernels/.
#pragma once

#include <c10/core/DeviceGuard.h>

#include "current_stream.h"
#include "empty_rows.h"
#include "kernels/types.h"
#include "tensor.h"

namespace moe_ext {

struct Cpu {
  // Whether the host reads the values of tensors, so that it can check them.
  static constexpr bool kReadsValues = true;

  // Creates an uninitialized, contiguous tensor.
  static Tensor empty(const Tensor& like, c10::SymIntArrayRef shape, at::ScalarType type) {
    return empty_rows(C10_AS_INTARRAYREF_SLOW(shape), like.options().dtype(type));
  }
  // Calls body(), which computes the outputs on the device of a tensor.
  template <typename Body>
  static void compute(const Tensor&, const Body& body) {
    body();
  }
  // Runs a kernel.
  template <typename Arguments>
  static void run(const Arguments& arguments) {
    run_on_cpu(arguments);
  }
};

struct Cuda {
  // A check of values would synchronize the host with the device.
  static constexpr bool kReadsValues = false;
  static constexpr Empty& empty = moe_ext::empty;

  template <typename Body>
  static void compute(const Tensor& tensor, const Body& body) {
    const c10::OptionalDeviceGuard guard(tensor.device());
    body();
  }
  template <typename Arguments>
  static void run(const Arguments& arguments) {
    CurrentStream current;
    run_on_cuda(arguments, current.stream());
  }
};

// Tensors without memory: the host function is what compilers need to know of an operator.
struct Meta {
  static constexpr bool kReadsValues = false;
  static constexpr Empty& empty = moe_ext::empty;

  template <typename Body>
  static void compute(const Tensor&, const Body&) {}
  template <typename Arguments>
  static void run(const Arguments&) {}
};

// Calls body.operator()<scalar_t>() for the floating-point type of a tensor.
template <typename Body>
void with_type(const Tensor& tensor, const Body& body) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return body.template operator()<float>();
    case at::kDouble:
      return body.template operator()<double>();
    case at::kHalf:
      return body.template operator()<c10::Half>();
    case at::kBFloat16:
      return body.template operator()<c10::BFloat16>();
    default:
      TORCH_INTERNAL_ASSERT(false, "not a floating-point type: ", tensor.scalar_type());
  }
}

// Returns the elements of a contiguous tensor; null if it is undefined.
template <typename T>
const T* data_of(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

}  // namespace moe_ext
