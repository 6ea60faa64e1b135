#include "experts.h"

namespace moe_ext::autograd {
namespace {

struct Experts : torch::autograd::Function<Experts> {
  static constexpr bool is_traceable = true;

  // Torch finds tensors only among the direct arguments, so no tensor that may need a gradient is
  // inside a struct. The hidden layers, which have no gradient, go to `hidden`.
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& gates,
                        const at::TensorList& weights, const at::TensorList& biases,
                        const at::TensorList& lora_a, const at::TensorList& lora_b,
                        const Routing* routing, const FeedForward* network, bool keep_hidden,
                        std::vector<Tensor>* hidden) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    Tensor y;
    std::tie(y, *hidden) = call_experts(x, *routing, *network, keep_hidden);
    variable_list saved{x, or_undefined(routing->offsets), or_undefined(routing->inverse),
                        or_undefined(routing->token_offsets), or_undefined(gates)};
    std::vector<int64_t> sizes;
    for (const at::TensorList list :
         {weights, biases, lora_a, lora_b, network->lora.masks, at::TensorList(*hidden)}) {
      sizes.push_back(static_cast<int64_t>(list.size()));
      saved.insert(saved.end(), list.begin(), list.end());
    }
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    auto& data = ctx->saved_data;
    data["sizes"] = std::move(sizes);
    data["activation"] = std::string(network->activation);
    if (!network->activation_args.empty()) {
      data["activation_args"] = network->activation_args.vec();
    }
    if (!lora_a.empty()) data["lora_scales"] = network->lora.scales.vec();
    if (network->packed) {
      data["formats"] = network->packed->formats;
      data["groups"] = network->packed->groups.vec();
      data["columns"] = network->packed->columns.vec();
    }
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    constexpr size_t kOthers = 4;  // the arguments of forward after the parameters
    const auto saved = ctx->get_saved_variables();
    auto tensors = at::TensorList(saved).slice(5);
    auto& data = ctx->saved_data;
    std::vector<at::TensorList> lists;
    for (const int64_t size : data["sizes"].toIntVector()) {
      lists.push_back(tensors.slice(0, size));
      tensors = tensors.slice(size);
    }
    const size_t num_parameters =
        lists[0].size() + lists[1].size() + lists[2].size() + lists[3].size();
    variable_list gradients(2 + num_parameters + kOthers);
    if (!grads[0].defined()) return gradients;
    const Routing routing{.offsets = if_defined(saved[1]),
                          .inverse = if_defined(saved[2]),
                          .token_offsets = if_defined(saved[3]),
                          .gates = if_defined(saved[4])};
    const auto numbers = [&](const char* name) {
      return data.count(name) > 0 ? data[name].toDoubleVector() : std::vector<double>();
    };
    const auto activation_args = numbers("activation_args"), lora_scales = numbers("lora_scales");
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
    // Torch numbers the tensors that are present: x, the gates and the parameters.
    const bool needs_x = ctx->needs_input_grad(0);
    const size_t first = routing.gates ? 2 : 1;
    c10::List<bool> needs_parameters;
    for (size_t i = 0; i < num_parameters; ++i) {
      needs_parameters.push_back(ctx->needs_input_grad(first + i));
    }
    const auto [grad_x, grad_gates, grad_parameters] = call_experts_backward(
        grads[0], saved[0], routing, network, /*hidden=*/lists[5], needs_x, needs_parameters);
    if (needs_x) gradients[0] = grad_x;
    if (routing.gates) gradients[1] = grad_gates;
    for (size_t i = 0; i < num_parameters; ++i) {
      if (needs_parameters[i]) gradients[2 + i] = grad_parameters[i];
    }
    return gradients;
  }
};

ExpertsOutputs experts(const Tensor& x, const Routing& routing, const FeedForward& network,
                       bool keep_hidden) {
  TORCH_CHECK_VALUE(!network.packed || !network.packed->is_integer(),
                    "packed_experts: arithmetic must be exact where a gradient is needed (use "
                    "torch.no_grad()), got 'integer'");
  std::vector<Tensor> hidden;
  Tensor y = Experts::apply(x, routing.gates, network.weights, network.biases, network.lora.a,
                            network.lora.b, &routing, &network, keep_hidden, &hidden);
  return {std::move(y), std::move(hidden)};
}

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  moe_ext::autograd::differentiable<"experts", &moe_ext::experts_of<moe_ext::autograd::experts>>(m);
  m.impl("_experts_backward", moe_ext::autograd::no_second_derivative());
}
