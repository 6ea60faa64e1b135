// Allocates large outputs: page faults at the first write are most of the cost of fresh memory.
#pragma once

#include "../tensor.h"

namespace moe_ext::cpu {

// Like at::empty, but large tensors use huge pages and the memory of freed tensors of about this
// size.
at::Tensor empty_rows(at::IntArrayRef sizes, const at::TensorOptions& options);

// The Empty of the CPU.
inline Tensor empty(const Tensor& like, c10::SymIntArrayRef shape, at::ScalarType type) {
  return empty_rows(C10_AS_INTARRAYREF_SLOW(shape), like.options().dtype(type));
}

// Returns the cached memory of freed tensors to the operating system.
void empty_cache();

// The bytes of freed tensors that are cached, and the most that are.
int64_t cached_bytes();
int64_t cache_limit();

}  // namespace moe_ext::cpu
