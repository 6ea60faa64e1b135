// Counts the tokens of each expert for the selection bias (arXiv 2408.15664).
//
// Activation recomputation runs a forward pass a second time, within the backward pass. Whether a
// backward pass is running is known only when the operator runs: a compiled graph is the same in
// both passes.
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include "checks.h"
#include "implement.h"

namespace moe_ext {
namespace {

void count_tokens(Tensor& counts, const Tensor& load) {
  constexpr auto op = "_count_tokens_";
  check_dim(op, "counts", counts, 1);
  check_type(op, "counts", counts, at::kLong);
  check_device(op, "load", load, counts);
  check_shape(op, "load", load, counts.sym_sizes());
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  counts.add_(load.to(at::kLong));
}

}  // namespace
}  // namespace moe_ext

TORCH_LIBRARY_IMPL(moe_ext, CompositeExplicitAutograd, m) {
  moe_ext::implement<"_count_tokens_", &moe_ext::count_tokens>(m);
}

// Torch's fallback cannot write to a tensor with the negative bit unless it is returned.
TORCH_LIBRARY_IMPL(moe_ext, Negative, m) {
  moe_ext::implement<"_count_tokens_", &moe_ext::count_tokens>(m);
}

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  m.impl("_count_tokens_", torch::CppFunction::makeFallthrough());  // no derivative
}
