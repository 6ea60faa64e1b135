// Computes the logits of all gates.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <moe_ext/ops.h>

namespace moe_ext::nn {

// Returns at least float32, the dtype of every value that a gate computes.
inline at::ScalarType wide_type(const at::Tensor& x) {
  return c10::promoteTypes(x.scalar_type(), at::kFloat);
}

// Converts x to at least float32; a gate calls this once for all its matrices.
inline at::Tensor widened(const at::Tensor& x) { return x.to(wide_type(x)); }

// Computes x * weight as routed, in at least float32, also under autocast. moe_ext::ops::load
// subtracts a threshold from a logit, which cancels in lower precision. On the CPU, a row's result
// does not depend on the other rows.
//
//   weight: [D, E]; with routing [G, D, E], one matrix for each of G groups of rows.
inline at::Tensor logits(const at::Tensor& x, const at::Tensor& weight,
                         const ops::ExpertsOptions& routing = {}) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto type = c10::promoteTypes(wide_type(x), weight.scalar_type());
  const auto matrices = weight.to(type);
  return ops::experts(x.to(type), {matrices.dim() == 2 ? matrices.unsqueeze(0) : matrices}, {},
                      "relu", routing);
}

}  // namespace moe_ext::nn
