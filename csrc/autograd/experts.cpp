#include "../experts_operator.h"
#include "function.h"

namespace moe_ext::autograd {
namespace {

struct Experts : torch::autograd::Function<Experts> {
  static constexpr bool is_traceable = true;

  // Returns y and the hidden layers, which are not differentiable. Torch finds tensors only among
  // the direct arguments, so no tensor may be inside a struct.
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& offsets,
                               const OptionalTensor& inverse, const OptionalTensor& token_offsets,
                               const OptionalTensor& gates, const at::TensorList& weights,
                               const at::TensorList& biases, const std::string& activation,
                               at::ArrayRef<double> activation_args, const PackedLayers* packed,
                               bool keep_hidden) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [y, hidden] = call_experts(
        x, {.offsets = offsets, .inverse = inverse, .token_offsets = token_offsets, .gates = gates},
        {.weights = weights,
         .biases = biases,
         .activation = activation,
         .activation_args = activation_args,
         .packed = packed},
        keep_hidden);
    variable_list saved{x, or_undefined(offsets), or_undefined(inverse),
                        or_undefined(token_offsets), or_undefined(gates)};
    saved.insert(saved.end(), weights.begin(), weights.end());
    saved.insert(saved.end(), biases.begin(), biases.end());
    saved.insert(saved.end(), hidden.begin(), hidden.end());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["num_layers"] = static_cast<int64_t>(weights.size());
    ctx->saved_data["num_biases"] = static_cast<int64_t>(biases.size());
    ctx->saved_data["activation"] = activation;
    ctx->saved_data["activation_args"] = activation_args.vec();
    if (packed != nullptr) {
      ctx->saved_data["formats"] = packed->formats;
      ctx->saved_data["groups"] = packed->groups.vec();
      ctx->saved_data["columns"] = packed->columns.vec();
    }
    ctx->saved_data["needs_x"] = x.requires_grad();
    c10::List<bool> needs_parameters;
    for (const at::TensorList parameters : {weights, biases}) {
      for (const Tensor& each : parameters) needs_parameters.push_back(each.requires_grad());
    }
    ctx->saved_data["needs_parameters"] = needs_parameters;
    ctx->mark_non_differentiable(hidden);
    ctx->set_materialize_grads(false);  // no zero gradients of the size of hidden
    variable_list outputs{y};
    outputs.insert(outputs.end(), hidden.begin(), hidden.end());
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto num_layers = ctx->saved_data["num_layers"].toInt();
    const auto num_biases = ctx->saved_data["num_biases"].toInt();
    if (!grads[0].defined()) return variable_list(9 + num_layers + num_biases);
    const auto tensors = at::TensorList(saved);
    const Routing routing{.offsets = if_defined(saved[1]),
                          .inverse = if_defined(saved[2]),
                          .token_offsets = if_defined(saved[3]),
                          .gates = if_defined(saved[4])};
    const auto activation_args = ctx->saved_data["activation_args"].toDoubleVector();
    std::vector<int64_t> groups, columns;
    std::optional<PackedLayers> packed;
    if (ctx->saved_data.count("formats") > 0) {
      groups = ctx->saved_data["groups"].toIntVector();
      columns = ctx->saved_data["columns"].toIntVector();
      packed.emplace(PackedLayers{
          .formats = c10::impl::toTypedList<std::string>(ctx->saved_data["formats"].toList()),
          .groups = groups,
          .columns = columns});
    }
    const FeedForward network{.weights = tensors.slice(5, num_layers),
                              .biases = tensors.slice(5 + num_layers, num_biases),
                              .activation = ctx->saved_data["activation"].toStringRef(),
                              .activation_args = activation_args,
                              .packed = packed ? &*packed : nullptr};
    const auto hidden = tensors.slice(5 + num_layers + num_biases);
    const bool needs_x = ctx->saved_data["needs_x"].toBool();
    const auto needs_parameters = ctx->saved_data["needs_parameters"].toBoolList();
    auto [grad_x, grad_gates, grad_parameters] = call_experts_backward(
        grads[0], saved[0], routing, network, hidden, needs_x, needs_parameters);
    for (size_t i = 0; i < grad_parameters.size(); ++i) {
      if (!needs_parameters[i]) grad_parameters[i].reset();
    }
    variable_list out{needs_x ? grad_x : Tensor(), Tensor(), Tensor(), Tensor(),
                      routing.gates ? grad_gates : Tensor()};
    out.insert(out.end(), grad_parameters.begin(), grad_parameters.end());
    out.insert(out.end(), {Tensor(), Tensor(), Tensor(), Tensor()});
    return out;
  }
};

ExpertsOutputs experts(const Tensor& x, const Routing& routing, const FeedForward& network,
                       bool keep_hidden) {
  TORCH_CHECK_VALUE(network.packed == nullptr || !network.packed->is_integer(),
                    "packed_experts: arithmetic must be exact where a gradient is needed (use "
                    "torch.no_grad()), got 'integer'");
  const auto out =
      Experts::apply(x, routing.offsets, routing.inverse, routing.token_offsets, routing.gates,
                     network.weights, network.biases, std::string(network.activation),
                     network.activation_args, network.packed, keep_hidden);
  return {out[0], {out.begin() + 1, out.end()}};
}

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  moe_ext::autograd::differentiable<"experts", &moe_ext::experts_of<moe_ext::autograd::experts>>(m);
  moe_ext::autograd::differentiable<"packed_experts",
                                    &moe_ext::packed_experts_of<moe_ext::autograd::experts>>(m);
  m.impl("_packed_experts_backward", moe_ext::autograd::no_second_derivative());
  m.impl("_experts_backward", moe_ext::autograd::no_second_derivative());
}
