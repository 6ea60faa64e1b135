// Looks up an operator of this library by name, to call it through the dispatcher.
//
// Keep the result in a static variable: the lookup takes a lock. `Signature` is the operator's C++
// type.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

namespace moe_ext {

// A string as a template argument.
template <size_t size>
struct Name {
  constexpr Name(const char (&literal)[size]) { std::copy_n(literal, size, text); }
  char text[size];
};

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// An operator that callers of the C++ functions reach. They may pass undefined tensors, which
// Python does not have.
template <typename Signature>
class PublicOperator;

template <typename Result, typename... Arguments>
class PublicOperator<Result(Arguments...)> {
 public:
  explicit PublicOperator(const char* name) : handle_(find_operator<Result(Arguments...)>(name)) {}

  // An undefined optional tensor is absent. Throws c10::TypeError for another undefined tensor.
  Result call(Arguments... arguments) const {
    size_t position = 0;
    (check_defined(position++, arguments), ...);
    return handle_.call(absent_if_undefined(std::forward<Arguments>(arguments))...);
  }

 private:
  template <typename T>
  void check_defined(size_t position, const T& argument) const {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      TORCH_CHECK_TYPE(argument.defined(), text(handle_.schema().name()), ": ",
                       handle_.schema().arguments()[position].name(),
                       " must be a tensor, got an undefined one");
    } else if constexpr (std::is_same_v<T, at::TensorList>) {
      for (const auto& tensor : argument) {
        TORCH_CHECK_TYPE(tensor.defined(), text(handle_.schema().name()), ": ",
                         handle_.schema().arguments()[position].name(),
                         " must have only tensors, got an undefined one");
      }
    }
  }

  template <typename T>
  static T&& absent_if_undefined(T&& argument) {
    return std::forward<T>(argument);
  }
  static const std::optional<at::Tensor>& absent_if_undefined(
      const std::optional<at::Tensor>& argument) {
    static const std::optional<at::Tensor> absent;
    return argument && !argument->defined() ? absent : argument;
  }

  // Returns the name of an operator without its namespace.
  static std::string_view text(std::string_view name) { return name.substr(name.find("::") + 2); }

  c10::TypedOperatorHandle<Result(Arguments...)> handle_;
};

}  // namespace moe_ext
