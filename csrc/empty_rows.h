// Allocates large outputs on the CPU.
#pragma once

#include "tensor.h"

namespace moe_ext {

// Like at::empty, but large tensors use huge pages and the memory of freed tensors of about this
// size; see cpu/memory.h.
Tensor empty_rows(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace moe_ext
