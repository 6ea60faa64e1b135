// What all operators share of tensors: their names, their types, and how an output is made.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>

namespace moe_ext {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The type of sums and of everything after the logits: float32 for the half types.
inline at::ScalarType accumulate_type(const Tensor& tensor) {
  return at::toOpMathType(tensor.scalar_type());
}

// Indices come as int64 or as int32; kernels read contiguous int64.
inline Tensor contiguous_index(const Tensor& index) {
  if (index.scalar_type() == at::kLong) return index.contiguous();
  return index.to(at::kLong).contiguous();
}

inline OptionalTensor contiguous_index(const OptionalTensor& index) {
  return index ? OptionalTensor(contiguous_index(*index)) : std::nullopt;
}

// Makes an uninitialised, contiguous tensor on the device of `like`. Every operator's outputs are
// made by one function for all devices, which is given the device's own Empty.
using Empty = Tensor(const Tensor& like, c10::SymIntArrayRef shape, at::ScalarType type);

inline Tensor empty(const Tensor& like, c10::SymIntArrayRef shape, at::ScalarType type) {
  return at::empty_symint(shape, like.options().dtype(type));
}

// An output of a tensor's own shape and type.
inline Tensor empty_of(Empty& empty, const Tensor& tensor) {
  return empty(tensor, tensor.sym_sizes(), tensor.scalar_type());
}

}  // namespace moe_ext
