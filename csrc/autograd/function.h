// Helpers that the autograd functions share.
#pragma once

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "../operator.h"
#include "../tensor.h"

namespace moe_ext::autograd {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Conversions between an optional tensor and a saved variable, where undefined means absent.
inline Tensor or_undefined(const OptionalTensor& tensor) { return tensor.value_or(Tensor()); }

inline OptionalTensor if_defined(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// Returns whether autograd follows one of the tensors, backward or forward. Otherwise an operator
// skips its Function, whose bookkeeping takes longer than a small kernel. Function::apply refuses
// forward derivatives.
template <typename... Tensors>
bool is_differentiated(const Tensors&... tensors) {
  const auto has_forward_gradient = [](const auto& each) {
    if constexpr (std::is_same_v<std::decay_t<decltype(each)>, at::TensorList>) {
      return torch::autograd::isFwGradDefinedTensorList(each);
    } else {
      return torch::autograd::isFwGradDefined(each);
    }
  };
  return torch::autograd::compute_requires_grad(tensors...) ||
         (has_forward_gradient(tensors) || ...);
}

// A backward operator has no derivative: a second derivative is an error, not zero.
inline torch::CppFunction no_second_derivative() {
  return torch::autograd::autogradNotImplementedFallback();
}

}  // namespace moe_ext::autograd
