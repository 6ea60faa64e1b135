// The experts on CUDA: gather of the tokens, feed-forward networks, gated sum (Eq. 1).
//
// A layer of an expert computes Z = A W + b; the activation of Z is the input A of the next layer.
// The GEMMs leave out b, and so does the hidden Z that forward saves. The kernel that reads Z adds
// it.
// Backward, with P = dL/dA of the last layer before the gates are applied:
//   dG = <P, A> + <dy, b>. This does not need the expert's output, so it is not saved.
//   dW = A^T dZ, db = sum of the rows of dZ, dA = dZ W^T, dZ' = dA * activation'(Z').
// In the last layer dZ = g dy. The gates g are applied late, so that dy needs no pass of its own:
//   dW = (g A)^T dy, db = sum of g dy, dZ' = g P * activation'(Z').
#include "../experts.h"

#include <optional>
#include <vector>

#include "../implement.h"
#include "expert_layers.h"

namespace moe_ext {
namespace {

ExpertsOutputs experts_cuda(const Tensor& x, const Routing& routing, const FeedForward& network,
                            bool keep_hidden) {
  const auto* op = network.op();
  check_experts(op, x, routing, network);
  const c10::OptionalDeviceGuard guard(x.device());
  const CudaExperts experts(op, x, routing, network);
  std::vector<Tensor> hidden;
  Tensor a = experts.input();
  for (int64_t l = 0; l + 1 < experts.num_layers(); ++l) {
    const Tensor z = experts.linear(l, a);
    a = experts.next_input(l, z);
    if (keep_hidden) hidden.push_back(z);
  }
  const Tensor rows = experts.linear(experts.num_layers() - 1, a);
  if (!routing.gates) return {experts.with_bias(rows), hidden};
  Tensor y = experts_output(empty, x, routing, network);
  experts.combine(rows, routing.gates->to(accumulate_type(x)), y);
  return {y, hidden};
}

// The gradients of the parameters. One that is not needed has shape [0].
class ParameterGradients {
 public:
  ParameterGradients(const CudaExperts& experts, const FeedForward& network,
                     const c10::List<bool>& needed)
      : experts_(experts), needed_(needed), places_(network.places()) {
    for (const at::TensorList parameters : network.parameters()) {
      for (const Tensor& each : parameters) {
        // A gradient with elements is computed later. An absent adapter has no elements.
        const bool is_empty = each.numel() == 0;
        gradients_.push_back(
            experts_gradient_of(empty, each, is_empty && needs(gradients_.size())));
      }
    }
  }

  // Whether a layer's gradients need its input.
  bool need_input(int64_t layer) const {
    return needs(places_.weight(layer)) ||
           (experts_.has_lora(layer) &&
            (needs(places_.lora_a(layer)) || needs(places_.lora_b(layer))));
  }

  // Computes the gradients of a layer with the input a and the gradient `grad` of its output. The
  // gates of the last layer, or null, are in a unless the product would underflow; then they
  // multiply grad, in place.
  void compute(int64_t layer, const Tensor& a, const Tensor& grad,
               const CudaExperts::Gates* gates) {
    const size_t weight = places_.weight(layer), bias = places_.bias(layer),
                 lora_a = places_.lora_a(layer), lora_b = places_.lora_b(layer);
    if (experts_.has_bias() && needs(bias)) {
      gradients_[bias] =
          experts_.sum_by_expert(grad, gates != nullptr ? gates->row_gates : Tensor());
    }
    if (!need_input(layer)) return;
    if (gates != nullptr && !gates->multiply_a) grad.mul_(gates->row_gates.unsqueeze(1));
    if (needs(weight)) {
      gradients_[weight] = experts_.matrix_gradient(experts_.weight(layer), a, grad);
    }
    if (!experts_.has_lora(layer)) return;
    if (needs(lora_a)) {
      gradients_[lora_a] = experts_.matrix_gradient(
          experts_.lora_a(layer), experts_.masked(layer, a), experts_.lora_gradient(layer, grad));
    }
    if (needs(lora_b)) {
      gradients_[lora_b] =
          experts_.matrix_gradient(experts_.lora_b(layer), experts_.lora_input(layer, a), grad);
    }
  }

  const std::vector<Tensor>& gradients() const { return gradients_; }

 private:
  bool needs(size_t place) const { return needed_[place]; }

  const CudaExperts& experts_;
  const c10::List<bool>& needed_;
  const ParameterPlaces places_;
  std::vector<Tensor> gradients_;
};

ExpertsGradients experts_backward_cuda(const Tensor& grad_y, const Tensor& x,
                                       const Routing& routing, const FeedForward& network,
                                       at::TensorList hidden, bool needs_x,
                                       const c10::List<bool>& needs_parameters) {
  constexpr auto* op = "_experts_backward";
  check_experts_backward(grad_y, x, routing, network, hidden, needs_parameters);
  const c10::OptionalDeviceGuard guard(x.device());
  // A backward pass under autocast would cast the inputs of torch's GEMMs to the autocast type.
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  const CudaExperts experts(op, x, routing, network);
  const std::vector<Tensor> zs = experts.outputs(hidden);
  const Tensor dy = grad_y.contiguous();

  std::optional<CudaExperts::Gates> gates;
  Tensor grad = dy;  // of a layer's output, without the gates
  if (routing.gates) {
    const Tensor values = routing.gates->to(accumulate_type(x)).contiguous();
    gates.emplace(CudaExperts::Gates{.values = values,
                                     .gradient = empty_of(empty, values),
                                     .dy = dy,
                                     .row_gates = at::empty({values.numel()}, values.options()),
                                     // dy has a loss scale in float16; without it, g A underflows.
                                     .multiply_a = x.scalar_type() != at::kHalf});
    grad = experts.rows_of(dy);
  }
  ParameterGradients parameters(experts, network, needs_parameters);
  const int64_t first_learned = first_learned_layer(network, needs_parameters);
  const int64_t last = experts.num_layers() - 1;
  for (int64_t l = last; l >= 0; --l) {
    const bool needs_grad = needs_x || l > first_learned;
    const CudaExperts::Gates* const layer_gates = l == last && gates ? &*gates : nullptr;
    const auto in =
        experts.backward(l, zs, grad, layer_gates, parameters.need_input(l), needs_grad);
    parameters.compute(l, in.a, grad, layer_gates);
    if (!needs_grad) break;
    grad = in.grad;
  }

  Tensor grad_x = grad;  // the gradient of the rows, if x holds rows
  if (!needs_x || routing.inverse) grad_x = experts_gradient_of_x(empty, x, needs_x);
  if (needs_x && routing.inverse) {
    sum_over_slots<Cuda>(grad, experts.slots(), /*weights=*/Tensor(), grad_x);
  }
  const Tensor grad_gates = gates ? gates->gradient.to(routing.gates->scalar_type())
                                  : experts_gradient_of_gates(empty, x, routing.gates);
  return {grad_x, grad_gates, parameters.gradients()};
}

}  // namespace
}  // namespace moe_ext

TORCH_LIBRARY_IMPL(moe_ext, CUDA, m) {
  moe_ext::implement<"experts", &moe_ext::experts_of<moe_ext::experts_cuda>>(m);
  moe_ext::implement<"_experts_backward",
                     &moe_ext::experts_backward_of<moe_ext::experts_backward_cuda>>(m);
}
