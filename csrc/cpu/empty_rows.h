// Large fresh outputs: most of their cost is the page faults of their first touch.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>

namespace moe_ext::cpu {

// at::empty, with huge pages asked for where the tensor spans several of them.
inline at::Tensor empty_rows(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor rows = at::empty(sizes, options);
#if defined(__linux__)
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const auto begin = reinterpret_cast<uintptr_t>(rows.mutable_data_ptr());
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (begin + rows.nbytes()) / kHugePage * kHugePage;
  // Only advice: where the system does not take it, the pages are small and nothing else changes.
  if (last >= first + 2 * kHugePage) {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
#endif
  return rows;
}

}  // namespace moe_ext::cpu
