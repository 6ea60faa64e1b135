// Computes the logits of all gates.
#pragma once

#include <c10/core/ScalarType.h>
#include <moe_ext/ops.h>

#include <vector>

#include "../find_operator.h"

namespace moe_ext::nn {

// Converts x to at least float32, the dtype of every value that a gate computes; a gate calls this
// once for all its logits.
inline at::Tensor widened(const at::Tensor& x) {
  return x.to(c10::promoteTypes(x.scalar_type(), at::kFloat));
}

// Computes x * weight as routed for each of the weights, in at least float32, also under autocast,
// as the gates of Python do. On the CPU, a row's result does not depend on the other rows.
//
//   weights: [D, E]; with routing [G, D, E], one matrix for each of G groups of rows.
inline std::vector<at::Tensor> logits_of_all(const at::Tensor& x, at::TensorList weights,
                                             const ops::ExpertsOptions& routing = {}) {
  using Index = const std::optional<at::Tensor>&;
  using Signature = std::vector<at::Tensor>(const at::Tensor&, at::TensorList, Index, Index, Index);
  static const auto op = find_operator<Signature>("moe_ext::_logits");
  return op.call(x, weights, routing.offsets, routing.inverse, routing.token_offsets);
}

// The same for a single weight.
inline at::Tensor logits(const at::Tensor& x, const at::Tensor& weight,
                         const ops::ExpertsOptions& routing = {}) {
  return logits_of_all(x, weight, routing).front();
}

}  // namespace moe_ext::nn
