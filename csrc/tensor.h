// What all operators need for tensors: names, types, and the creation of outputs.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>

namespace moe_ext {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The type of sums and of every value computed from the logits: float32 for half precision.
inline at::ScalarType accumulate_type(const Tensor& tensor) {
  return at::toOpMathType(tensor.scalar_type());
}

// Returns an option of an operator as its kernels use it, in the accumulate_type of a tensor.
inline double in_accumulate_type(const Tensor& tensor, double option) {
  return accumulate_type(tensor) == at::kDouble ? option : static_cast<float>(option);
}

// Returns an undefined tensor for an absent one.
inline Tensor contiguous(const OptionalTensor& tensor) {
  return tensor ? tensor->contiguous() : Tensor();
}

// Callers pass int64 or int32 indices; kernels read contiguous int64. Returns an undefined tensor
// for an absent one.
inline Tensor contiguous_index(const Tensor& index) {
  if (index.scalar_type() == at::kLong) return index.contiguous();
  return index.to(at::kLong).contiguous();
}

inline Tensor contiguous_index(const OptionalTensor& index) {
  return index ? contiguous_index(*index) : Tensor();
}

// Creates an uninitialized, contiguous tensor on the device of `like`. One function creates an
// operator's outputs for all devices; it receives the Empty of the device.
using Empty = Tensor(const Tensor& like, c10::SymIntArrayRef shape, at::ScalarType type);

inline Tensor empty(const Tensor& like, c10::SymIntArrayRef shape, at::ScalarType type) {
  return at::empty_symint(shape, like.options().dtype(type));
}

// Creates an output with the shape and the type of `tensor`.
inline Tensor empty_of(Empty& empty, const Tensor& tensor) {
  return empty(tensor, tensor.sym_sizes(), tensor.scalar_type());
}

}  // namespace moe_ext
