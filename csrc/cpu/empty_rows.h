// Large outputs: most of the cost of a fresh one is the page faults of its first touch.
#pragma once

#include "../tensor.h"

namespace moe_ext::cpu {

// at::empty for large tensors: in huge pages, and where a tensor of about this size was before, if
// one was freed.
at::Tensor empty_rows(at::IntArrayRef sizes, const at::TensorOptions& options);

// The Empty of the CPU.
inline Tensor empty(const Tensor& like, c10::SymIntArrayRef shape, at::ScalarType type) {
  return empty_rows(C10_AS_INTARRAYREF_SLOW(shape), like.options().dtype(type));
}

// Returns to the system what freed tensors have left.
void empty_cache();

}  // namespace moe_ext::cpu
