// Helpers that the autograd functions share.
#pragma once

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "../find_operator.h"
#include "../tensor.h"

namespace moe_ext::autograd {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Conversions between an optional tensor and a saved variable, where undefined means absent.
inline Tensor or_undefined(const OptionalTensor& tensor) { return tensor.value_or(Tensor()); }

inline OptionalTensor if_defined(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// Returns whether autograd follows an argument of an operator, backward or forward.
template <typename T>
bool is_differentiated(const T& argument) {
  using torch::autograd::compute_requires_grad;
  if constexpr (std::is_same_v<T, Tensor> || std::is_same_v<T, OptionalTensor>) {
    return compute_requires_grad(argument) || torch::autograd::isFwGradDefined(argument);
  } else if constexpr (std::is_same_v<T, at::TensorList>) {
    return compute_requires_grad(argument) || torch::autograd::isFwGradDefinedTensorList(argument);
  } else if constexpr (std::is_same_v<T, std::optional<at::TensorList>>) {
    return argument && is_differentiated(*argument);
  }
  return false;
}

// An operator that computes gradients. Its call skips the autograd kernels if autograd follows no
// argument: the one of a second derivative makes a copy of every argument.
template <typename Signature>
class BackwardOperator;

template <typename Result, typename... Arguments>
class BackwardOperator<Result(Arguments...)> {
 public:
  explicit BackwardOperator(const char* name)
      : handle_(find_operator<Result(Arguments...)>(name)) {}

  Result call(Arguments... arguments) const {
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (!(is_differentiated<std::decay_t<Arguments>>(arguments) || ...)) below.emplace();
    return handle_.call(std::forward<Arguments>(arguments)...);
  }

 private:
  c10::TypedOperatorHandle<Result(Arguments...)> handle_;
};

// Calls the operator `name` without its autograd kernel.
template <Name name, typename Signature>
struct BelowAutograd;

template <Name name, typename Result, typename... Arguments>
struct BelowAutograd<name, Result(Arguments...)> {
  static Result call(Arguments... arguments) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op =
        find_operator<Result(Arguments...)>((std::string("moe_ext::") + name.text).c_str());
    return op.call(std::forward<Arguments>(arguments)...);
  }
};

// The autograd kernel of the operator `name`.
template <Name name, auto function>
struct Differentiable;

template <Name name, typename Result, typename... Arguments, Result (*function)(Arguments...)>
struct Differentiable<name, function> {
  static Result run(Arguments... arguments) {
    if ((is_differentiated<std::decay_t<Arguments>>(arguments) || ...)) {
      return function(std::forward<Arguments>(arguments)...);
    }
    return BelowAutograd<name, Result(Arguments...)>::call(std::forward<Arguments>(arguments)...);
  }
};

// Registers `function`, which applies a Function, as the derivative of the operator `name`. It runs
// only if autograd follows an argument: the bookkeeping of a Function takes longer than a small
// kernel.
template <Name name, auto function>
void differentiable(torch::Library& m) {
  m.impl(name.text, &Differentiable<name, function>::run);
}

// The Function of the operator `name`. Derived has forward, with the arguments of the operator and
// `call` for its outputs, and backward.
template <typename Derived, Name name, typename Signature>
struct OperatorFunction;

template <typename Derived, Name name, typename Result, typename... Arguments>
struct OperatorFunction<Derived, name, Result(Arguments...)>
    : torch::autograd::Function<Derived>, BelowAutograd<name, Result(Arguments...)> {
  static constexpr bool is_traceable = true;

  static Result differentiated(Arguments... arguments) {
    const auto outputs = Derived::apply(std::forward<Arguments>(arguments)...);
    if constexpr (std::is_same_v<Result, Tensor> || std::is_same_v<Result, variable_list>) {
      return outputs;
    } else {
      return [&]<size_t... i>(std::index_sequence<i...>) { return Result{outputs[i]...}; }
      (std::make_index_sequence<std::tuple_size_v<Result>>());
    }
  }

  static void implement(torch::Library& m) { differentiable<name, &differentiated>(m); }
};

// A backward operator has no derivative: a second derivative is an error, not zero.
inline torch::CppFunction no_second_derivative() {
  return torch::autograd::autogradNotImplementedFallback();
}

}  // namespace moe_ext::autograd
