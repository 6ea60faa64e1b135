// Registers kernels. Every kernel of an operator, on every device, checks here that the memory of
// its tensors can be read.
#pragma once

#include <ATen/EmptyTensor.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <string>
#include <type_traits>
#include <utility>

#include "errors.h"
#include "find_operator.h"
#include "tensor.h"

namespace moe_ext {

// Checks that a tensor is strided and that its storage has all bytes that its sizes need. name()
// returns the name of the argument, such as weights[0]. The dispatcher refuses other layouts, but
// not in an optional list, nor next to a tensor with torch's negative bit. Nothing else looks at
// the storage.
template <typename NameOf>
void check_memory(std::string_view op, const Tensor& tensor, const NameOf& name) {
  if (!tensor.defined()) return;
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, op, ": ", name(), " must be dense, got ",
                   tensor.layout());
  TORCH_CHECK_TYPE(!tensor.is_nested(), op, ": ", name(), " must be dense, got a nested tensor");
  const auto* impl = tensor.unsafeGetTensorImpl();
  // Tensors of the compiler have symbolic sizes; those of torch.func have no storage.
  if (tensor.is_meta() || !tensor.has_storage() || impl->has_symbolic_sizes_strides()) return;
  const auto present = tensor.storage().sym_nbytes().maybe_as_int();
  if (!present || tensor.numel() == 0) return;
  const size_t needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  TORCH_CHECK_VALUE(needed <= static_cast<size_t>(*present), op, ": ", name(),
                    " must have a storage of at least ", needed, " bytes for its shape ",
                    tensor.sizes(), ", got ", *present);
}

// Calls body(tensor, place) for the tensors of one argument of an operator. The place is [i] in a
// list, else empty.
template <typename Argument, typename Body>
void for_each_tensor(const Argument& argument, const Body& body) {
  if constexpr (std::is_same_v<Argument, Tensor>) {
    body(argument, [] { return std::string(); });
  } else if constexpr (std::is_same_v<Argument, OptionalTensor> ||
                       std::is_same_v<Argument, std::optional<at::TensorList>>) {
    if (argument) for_each_tensor(*argument, body);
  } else if constexpr (std::is_same_v<Argument, at::TensorList>) {
    for (size_t i = 0; i < argument.size(); ++i) {
      body(argument[i], [&] { return c10::str("[", i, "]"); });
    }
  }
}

// The kernel of the operator `name`, after the check of its tensors.
template <Name name, auto kernel, typename Result, typename... Arguments>
Result checked(Arguments... arguments) {
  size_t position = 0;
  const auto name_of_argument = [&] {
    const auto full_name = std::string("moe_ext::") + name.text;
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(full_name.c_str(), "");
    return op.schema().arguments()[position].name();
  };
  const auto check = [&](const auto& argument) {
    for_each_tensor(argument, [&](const Tensor& tensor, const auto& place) {
      check_memory(name.text, tensor, [&] { return name_of_argument() + place(); });
    });
    ++position;
  };
  (check(arguments), ...);
  return with_value_errors(
      [&]() -> Result { return kernel(std::forward<Arguments>(arguments)...); });
}

template <Name name, auto kernel, typename Result, typename... Arguments>
void implement_with(torch::Library& m, Result (*)(Arguments...)) {
  Result (*const function)(Arguments...) = &checked<name, kernel, Result, Arguments...>;
  m.impl(name.text, function);
}

// Registers `kernel` for the operator `name`.
template <Name name, auto kernel>
void implement(torch::Library& m) {
  implement_with<name, kernel>(m, kernel);
}

}  // namespace moe_ext
