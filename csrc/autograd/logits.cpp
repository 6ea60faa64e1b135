// _logits: the logits of a gate, with one node in autograd's graph for all its matrices.
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "../implement.h"
#include "experts.h"

namespace moe_ext::autograd {
namespace {

// Returns the matrices of a weight, [G, D, E].
Tensor matrices_of(const Tensor& weight) {
  return weight.dim() == 2 ? weight.unsqueeze(0) : weight;
}

// Experts of a single layer, which does not apply the activation.
FeedForward linear(const Tensor& matrices) {
  return {.weights = matrices, .biases = {}, .activation = "relu", .activation_args = {}};
}

Routing rows_of(const OptionalTensor& offsets, const OptionalTensor& inverse,
                const OptionalTensor& token_offsets) {
  return {.offsets = offsets,
          .inverse = inverse,
          .token_offsets = token_offsets,
          .gates = std::nullopt};
}

std::vector<Tensor> products(const Tensor& x, at::TensorList weights, const Routing& rows) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  std::vector<Tensor> logits;
  for (const Tensor& weight : weights) {
    const Tensor matrices = matrices_of(weight);
    auto [product, hidden] = call_experts(x, rows, linear(matrices), /*keep_hidden=*/false);
    logits.push_back(std::move(product));
  }
  return logits;
}

struct Logits : torch::autograd::Function<Logits> {
  static constexpr bool is_traceable = true;

  // `inputs` has x once for each weight, so that autograd adds the gradients of x as it would add
  // those of separate calls: the last weight comes first.
  static variable_list forward(AutogradContext* ctx, const at::TensorList& inputs,
                               const at::TensorList& weights, const Routing* rows) {
    variable_list saved{inputs[0], or_undefined(rows->offsets), or_undefined(rows->inverse),
                        or_undefined(rows->token_offsets)};
    saved.insert(saved.end(), weights.begin(), weights.end());
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    return products(inputs[0], weights, *rows);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto weights = at::TensorList(saved).slice(4);
    const auto rows = rows_of(if_defined(saved[1]), if_defined(saved[2]), if_defined(saved[3]));
    variable_list gradients(2 * weights.size() + 1);
    for (size_t i = 0; i < weights.size(); ++i) {
      const size_t input = weights.size() - 1 - i, weight = weights.size() + i;
      const bool needs_x = ctx->needs_input_grad(input),
                 needs_weight = ctx->needs_input_grad(weight);
      if (!grads[i].defined() || !(needs_x || needs_weight)) continue;
      const Tensor matrices = matrices_of(weights[i]);
      const auto [grad_x, grad_gates, grad_matrices] =
          call_experts_backward(grads[i], saved[0], rows, linear(matrices), /*hidden=*/{}, needs_x,
                                c10::List<bool>({needs_weight}));
      if (needs_x) gradients[input] = grad_x;
      if (!needs_weight) continue;
      const Tensor& grad = grad_matrices[0];
      gradients[weight] = weights[i].dim() == 2 ? grad.squeeze(0) : grad;
    }
    return gradients;
  }
};

// `load` subtracts a threshold from a logit, which cancels in lower precision.
std::vector<Tensor> logits(const Tensor& x, at::TensorList weights, const OptionalTensor& offsets,
                           const OptionalTensor& inverse, const OptionalTensor& token_offsets) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  auto type = c10::promoteTypes(x.scalar_type(), at::kFloat);
  for (const Tensor& weight : weights) type = c10::promoteTypes(type, weight.scalar_type());
  const Tensor input = x.to(type);
  std::vector<Tensor> matrices;
  for (const Tensor& weight : weights) matrices.push_back(weight.to(type));
  const auto rows = rows_of(offsets, inverse, token_offsets);
  const bool differentiated =
      is_differentiated(input) || is_differentiated(at::TensorList(matrices));
  if (matrices.empty() || !differentiated) return products(input, matrices, rows);
  const std::vector<Tensor> inputs(weights.size(), input);
  return Logits::apply(at::TensorList(inputs), at::TensorList(matrices), &rows);
}

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, CompositeImplicitAutograd, m) {
  moe_ext::implement<"_logits", &moe_ext::autograd::logits>(m);
}
