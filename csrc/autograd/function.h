// What the autograd functions share.
#pragma once

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "../operator.h"
#include "../tensor.h"

namespace moe_ext::autograd {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// An optional tensor as save_for_backward and as a saved variable: undefined means absent.
inline Tensor or_undefined(const OptionalTensor& tensor) { return tensor.value_or(Tensor()); }

inline OptionalTensor if_defined(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// The gradients of a backward operator: asking for them a second time is an error, not a zero.
inline torch::CppFunction no_second_derivative() {
  return torch::autograd::autogradNotImplementedFallback();
}

}  // namespace moe_ext::autograd
