// Large outputs: most of the cost of a fresh one is the page faults of its first touch.
#pragma once

#include <ATen/core/Tensor.h>

namespace moe_ext::cpu {

// at::empty for large tensors: in huge pages, and where a tensor of about this size was before, if
// one was freed.
at::Tensor empty_rows(at::IntArrayRef sizes, const at::TensorOptions& options);

// Returns to the system what freed tensors have left.
void empty_cache();

}  // namespace moe_ext::cpu
