// The host functions of the experts on the CPU.
#include "experts.h"

#include <ATen/ops/empty_like.h>

#include <optional>
#include <vector>

#include "implement.h"

namespace moe_ext {
namespace {

// The networks as kernels read them.
template <typename scalar_t>
class NetworkTensors {
 public:
  NetworkTensors(const FeedForward& network, int64_t fan_in) : network_(network) {
    const auto layouts = packed_layouts(network, fan_in);
    for (size_t l = 0; l < network.weights.size(); ++l) {
      ExpertLayer<scalar_t>& layer = layers_.emplace_back();
      layer.fan_in = fan_in;
      layer.columns = network.columns(l).expect_int();
      if (network.packed) {
        layer.layout = layouts[l];
        layer.panels = kept(network.weights[l].contiguous()).template const_data_ptr<uint8_t>();
      } else {
        layer.weight = matrices(in_known_layout(network.weights[l]));
      }
      if (!network.biases.empty()) layer.bias = data(readable_bias(network.biases[l]));
      if (has_lora(network.lora, l)) {
        layer.rank = network.lora.a[l].size(2);
        layer.lora_a = matrices(readable_lora(network.lora.a[l]));
        layer.lora_b = matrices(readable_lora(network.lora.b[l]));
        layer.lora_scale = network.lora.scales[l];
        if (has_mask(network.lora, l)) {
          layer.lora_mask =
              kept(network.lora.masks[l].contiguous()).template const_data_ptr<bool>();
        }
      }
      if (l + 1 < network.weights.size()) {
        fan_in = network.packed ? layouts[l + 1].inputs : network.weights[l + 1].size(1);
      }
    }
  }

  ExpertLayers<scalar_t> layers() const {
    return {.num_experts = network_.weights[0].size(0),
            .layers = layers_,
            .activation = network_.activation,
            .activation_args = {network_.activation_args.data(), network_.activation_args.size()},
            .packed = network_.packed.has_value(),
            .integer = network_.packed && network_.packed->is_integer()};
  }

 private:
  const Tensor& kept(const Tensor& tensor) { return tensors_.emplace_back(tensor); }
  const scalar_t* data(const Tensor& tensor) {
    return kept(tensor).template const_data_ptr<scalar_t>();
  }
  ExpertMatrices<const scalar_t> matrices(const Tensor& tensor) {
    return {.data = data(tensor), .transposed = is_transposed(tensor)};
  }

  const FeedForward& network_;
  std::vector<Tensor> tensors_;
  std::vector<ExpertLayer<scalar_t>> layers_;
};

template <typename scalar_t>
std::vector<scalar_t*> data_of_all(at::TensorList tensors) {
  std::vector<scalar_t*> data;
  for (const Tensor& tensor : tensors) data.push_back(tensor.mutable_data_ptr<scalar_t>());
  return data;
}

// Returns the gradients of the layers; `gradients` has the order of ParameterPlaces.
template <typename scalar_t>
std::vector<ExpertLayerGradients<scalar_t>> gradients_of_layers(
    const FeedForward& network, const std::vector<Tensor>& gradients) {
  const auto places = network.places();
  const auto data = [&](size_t place) {
    const Tensor& gradient = gradients[place];
    return gradient.numel() > 0 ? gradient.mutable_data_ptr<scalar_t>() : nullptr;
  };
  std::vector<ExpertLayerGradients<scalar_t>> layers(places.num_layers);
  for (size_t l = 0; l < places.num_layers; ++l) {
    layers[l].weight = data(places.weight(l));
    if (places.has_bias) layers[l].bias = data(places.bias(l));
    if (!places.has_lora) continue;
    layers[l].lora_a = data(places.lora_a(l));
    layers[l].lora_b = data(places.lora_b(l));
  }
  return layers;
}

template <typename Device>
ExpertsOutputs experts(const Tensor& x, const Routing& routing, const FeedForward& network,
                       bool keep_hidden) {
  const auto* op = network.op();
  check_experts(op, x, routing, network);
  const auto hidden = experts_hidden(Device::empty, x, routing, network, keep_hidden);
  Tensor y = experts_output(Device::empty, x, routing, network);
  Device::compute(x, [&] {
    const InputTensors source(op, x, routing, Device::kReadsValues);
    const Tensor rows = routing.gates ? empty_rows({source.num_rows(), y.size(1)}, x.options()) : y;
    with_type(x, [&]<typename scalar_t>() {
      const NetworkTensors<scalar_t> tensors(network, x.size(1));
      Device::run(ExpertsForward<scalar_t>{.network = tensors.layers(),
                                           .input = source.input<scalar_t>(),
                                           .hidden = data_of_all<scalar_t>(hidden),
                                           .rows = rows.mutable_data_ptr<scalar_t>()});
    });
    if (routing.gates) {
      sum_over_slots<Device>(rows, source.slots(), routing.gates->to(accumulate_type(x)), y);
    }
  });
  return {y, hidden};
}

template <typename Device>
ExpertsGradients experts_backward(const Tensor& grad_y, const Tensor& x, const Routing& routing,
                                  const FeedForward& network, at::TensorList hidden, bool needs_x,
                                  const c10::List<bool>& needs_parameters) {
  constexpr auto* op = "_experts_backward";
  check_experts_backward(grad_y, x, routing, network, hidden, needs_parameters);
  Tensor grad_x = experts_gradient_of_x(Device::empty, x, needs_x);
  Tensor grad_gates = experts_gradient_of_gates(Device::empty, x, routing.gates);
  const auto gradients = experts_gradients_of(Device::empty, network, needs_parameters);
  Device::compute(x, [&] {
    const InputTensors source(op, x, routing, Device::kReadsValues);
    const Tensor grad = grad_y.contiguous();
    const Tensor gates =
        routing.gates ? routing.gates->to(accumulate_type(x)).contiguous() : Tensor();
    const bool same = !gates.defined() || gates.scalar_type() == grad_gates.scalar_type();
    const Tensor grad_of_gates = same ? grad_gates : at::empty_like(gates);
    const bool has_rows = needs_x && routing.inverse;
    const Tensor rows = has_rows ? empty_rows({source.num_rows(), x.size(1)}, x.options()) : grad_x;
    std::vector<Tensor> kept;
    for (const Tensor& layer : hidden) kept.push_back(layer.contiguous());
    with_type(x, [&]<typename scalar_t>() {
      using acc_t = acc_type<scalar_t>;
      const NetworkTensors<scalar_t> tensors(network, x.size(1));
      Device::run(ExpertsBackward<scalar_t>{
          .network = tensors.layers(),
          .input = source.input<scalar_t>(),
          .hidden = data_of_all<scalar_t>(kept),
          .grad = grad.const_data_ptr<scalar_t>(),
          .gates = data_of<acc_t>(gates),
          .gradients = gradients_of_layers<scalar_t>(network, gradients),
          .first_learned = first_learned_layer(network, needs_parameters),
          .grad_gates = gates.defined() ? grad_of_gates.mutable_data_ptr<acc_t>() : nullptr,
          .grad_rows = needs_x ? rows.mutable_data_ptr<scalar_t>() : nullptr});
    });
    if (has_rows) sum_over_slots<Device>(rows, source.slots(), /*weights=*/Tensor(), grad_x);
    if (!same) grad_gates.copy_(grad_of_gates);
  });
  return {grad_x, grad_gates, gradients};
}

template <typename Device>
void implement_experts(torch::Library& m) {
  implement<"experts", &experts_of<experts<Device>>>(m);
  implement<"_experts_backward", &experts_backward_of<experts_backward<Device>>>(m);
}

}  // namespace
}  // namespace moe_ext

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) { moe_ext::implement_experts<moe_ext::Cpu>(m); }
TORCH_LIBRARY_IMPL(moe_ext, Meta, m) { moe_ext::implement_experts<moe_ext::Meta>(m); }
