#include "../experts_operator.h"
#include "function.h"

namespace moe_ext::autograd {
namespace {

ExpertsGradients call_experts_backward(const Tensor& grad_y, const Tensor& x,
                                       const Routing& routing, const FeedForward& network,
                                       at::TensorList hidden, bool needs_x,
                                       const c10::List<bool>& needs_parameters) {
  static const BackwardOperator<decltype(experts_backward_of<nullptr>)> op(
      "moe_ext::_experts_backward");
  const auto& [weights, biases, activation, activation_args, packed, lora] = network;
  const auto list =
      op.call(grad_y, x, routing.offsets, routing.inverse, routing.token_offsets, routing.gates,
              weights, if_any(biases), hidden, activation, needs_x, needs_parameters,
              if_any(activation_args), packed ? Strings(packed->formats) : std::nullopt,
              packed ? Integers(packed->groups) : std::nullopt,
              packed ? Integers(packed->columns) : std::nullopt, if_any(lora.a), if_any(lora.b),
              if_any(lora.scales), if_any(lora.masks));
  return {list[0], list[1], {list.begin() + 2, list.end()}};
}

struct Experts : torch::autograd::Function<Experts> {
  static constexpr bool is_traceable = true;

  // Returns y and the hidden layers, which are not differentiable. Torch finds tensors only among
  // the direct arguments, so no tensor may be inside a struct.
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& offsets,
                               const OptionalTensor& inverse, const OptionalTensor& token_offsets,
                               const OptionalTensor& gates, const at::TensorList& weights,
                               const at::TensorList& biases, const at::TensorList& lora_a,
                               const at::TensorList& lora_b, const at::TensorList& lora_masks,
                               const FeedForward* network, bool keep_hidden) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [y, hidden] = call_experts(
        x, {.offsets = offsets, .inverse = inverse, .token_offsets = token_offsets, .gates = gates},
        *network, keep_hidden);
    variable_list saved{x, or_undefined(offsets), or_undefined(inverse),
                        or_undefined(token_offsets), or_undefined(gates)};
    c10::List<int64_t> sizes;  // of the lists of tensors
    c10::List<bool> needs_parameters;
    for (const at::TensorList parameters : {weights, biases, lora_a, lora_b}) {
      sizes.push_back(static_cast<int64_t>(parameters.size()));
      saved.insert(saved.end(), parameters.begin(), parameters.end());
      for (const Tensor& each : parameters) needs_parameters.push_back(each.requires_grad());
    }
    sizes.push_back(static_cast<int64_t>(lora_masks.size()));
    saved.insert(saved.end(), lora_masks.begin(), lora_masks.end());
    saved.insert(saved.end(), hidden.begin(), hidden.end());
    ctx->save_for_backward(std::move(saved));
    auto& data = ctx->saved_data;
    data["sizes"] = sizes;
    data["needs_parameters"] = needs_parameters;
    data["needs_x"] = x.requires_grad();
    data["activation"] = std::string(network->activation);
    data["activation_args"] = network->activation_args.vec();
    data["lora_scales"] = network->lora.scales.vec();
    if (network->packed) {
      data["formats"] = network->packed->formats;
      data["groups"] = network->packed->groups.vec();
      data["columns"] = network->packed->columns.vec();
    }
    ctx->mark_non_differentiable(hidden);
    ctx->set_materialize_grads(false);  // no zero gradients of the size of hidden
    variable_list outputs{y};
    outputs.insert(outputs.end(), hidden.begin(), hidden.end());
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const auto needs_parameters = data["needs_parameters"].toBoolList();
    auto tensors = at::TensorList(saved).slice(5);
    std::vector<at::TensorList> lists;
    for (const int64_t size : data["sizes"].toIntVector()) {
      lists.push_back(tensors.slice(0, size));
      tensors = tensors.slice(size);
    }
    const size_t num_others = 2 + lists[4].size();  // the arguments of forward after the parameters
    if (!grads[0].defined()) return variable_list(5 + needs_parameters.size() + num_others);
    const Routing routing{.offsets = if_defined(saved[1]),
                          .inverse = if_defined(saved[2]),
                          .token_offsets = if_defined(saved[3]),
                          .gates = if_defined(saved[4])};
    const auto activation_args = data["activation_args"].toDoubleVector();
    const auto lora_scales = data["lora_scales"].toDoubleVector();
    Strings formats;
    std::vector<int64_t> groups, columns;
    if (data.count("formats") > 0) {
      formats = c10::impl::toTypedList<std::string>(data["formats"].toList());
      groups = data["groups"].toIntVector();
      columns = data["columns"].toIntVector();
    }
    const FeedForward network =
        network_of(lists[0], lists[1], data["activation"].toStringRef(), activation_args, formats,
                   groups, columns, "exact", lists[2], lists[3], lora_scales, lists[4]);
    const bool needs_x = data["needs_x"].toBool();
    auto [grad_x, grad_gates, grad_parameters] = call_experts_backward(
        grads[0], saved[0], routing, network, /*hidden=*/tensors, needs_x, needs_parameters);
    for (size_t i = 0; i < grad_parameters.size(); ++i) {
      if (!needs_parameters[i]) grad_parameters[i].reset();
    }
    variable_list out{needs_x ? grad_x : Tensor(), Tensor(), Tensor(), Tensor(),
                      routing.gates ? grad_gates : Tensor()};
    out.insert(out.end(), grad_parameters.begin(), grad_parameters.end());
    out.resize(out.size() + num_others);
    return out;
  }
};

ExpertsOutputs experts(const Tensor& x, const Routing& routing, const FeedForward& network,
                       bool keep_hidden) {
  TORCH_CHECK_VALUE(!network.packed || !network.packed->is_integer(),
                    "packed_experts: arithmetic must be exact where a gradient is needed (use "
                    "torch.no_grad()), got 'integer'");
  const auto out = Experts::apply(x, routing.offsets, routing.inverse, routing.token_offsets,
                                  routing.gates, network.weights, network.biases, network.lora.a,
                                  network.lora.b, network.lora.masks, &network, keep_hidden);
  return {out[0], {out.begin() + 1, out.end()}};
}

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  moe_ext::autograd::differentiable<"experts", &moe_ext::experts_of<moe_ext::autograd::experts>>(m);
  m.impl("_experts_backward", moe_ext::autograd::no_second_derivative());
}
