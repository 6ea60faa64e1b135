// The arguments of experts and _experts_backward: as structs and as the dispatcher passes them.
//
// The dispatcher passes a flat list of arguments, in the order of the schemas in moe_ext.cpp. Only
// this header repeats that list; kernels, autograd and autocast use the structs.
#pragma once

#include <ATen/core/List.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "find_operator.h"
#include "routing.h"

namespace moe_ext {

// The format, the group and the number of columns of each layer with packed weights.
struct PackedLayers {
  c10::List<std::string> formats;
  at::ArrayRef<int64_t> groups, columns;
  std::string_view arithmetic = "exact";  // or "integer"; see cpu/gemm/integer.h

  bool is_integer() const { return arithmetic == "integer"; }
};

// Low-rank adapters (LoRA, arXiv:2106.09685): a layer with the input A computes
// A W + scale (A a) b. All lists are empty, or have one value for each layer; without an adapter, a
// and b have shape [0].
struct LoraLayers {
  at::TensorList a;  // [E, fan_in, rank]
  at::TensorList b;  // [E, rank, columns]
  at::ArrayRef<double> scales;
  // Dropout: bool [R, fan_in] of each layer, or shape [0]; may be an empty list. a sees 0 in place
  // of the numbers of A where the mask is false.
  at::TensorList masks = {};
};

// The places of the parameters in one list: the weights of all layers, the biases, and the matrices
// a and b of the adapters. Gradients have this order.
struct ParameterPlaces {
  size_t num_layers;
  bool has_bias, has_lora;

  size_t weight(size_t layer) const { return layer; }
  size_t bias(size_t layer) const { return num_layers + layer; }
  size_t lora_a(size_t layer) const { return (has_bias ? 2 : 1) * num_layers + layer; }
  size_t lora_b(size_t layer) const { return num_layers + lora_a(layer); }
  size_t layer_of(size_t place) const { return place % num_layers; }
};

// The expert networks, all of one architecture: linear layers with an activation between them.
struct FeedForward {
  at::TensorList
      weights;            // [E, fan_in, columns] of each layer, contiguous or transposed; or packed
  at::TensorList biases;  // [E, columns] of each layer, or empty
  std::string_view activation;
  at::ArrayRef<double> activation_args;  // limit, alpha and offset, or empty
  std::optional<PackedLayers> packed = {};
  LoraLayers lora = {};

  // The lists of parameters, in the order of ParameterPlaces.
  std::array<at::TensorList, 4> parameters() const { return {weights, biases, lora.a, lora.b}; }
  ParameterPlaces places() const {
    return {.num_layers = weights.size(), .has_bias = !biases.empty(), .has_lora = !lora.a.empty()};
  }

  // The name of the public function, for errors.
  const char* op() const { return packed ? "packed_experts" : "experts"; }
  c10::SymInt columns(size_t layer) const {
    return packed ? packed->columns[layer] : weights[layer].sym_size(2);
  }
};

using ExpertsOutputs = std::tuple<Tensor, std::vector<Tensor>>;
// The gradients of x, of the gates, and of the parameters.
using ExpertsGradients = std::tuple<Tensor, Tensor, std::vector<Tensor>>;

template <typename T>
at::ArrayRef<T> list_of(const std::optional<at::ArrayRef<T>>& list) {
  return list.value_or(at::ArrayRef<T>());
}
template <typename T>
std::optional<at::ArrayRef<T>> if_any(at::ArrayRef<T> list) {
  return list.empty() ? std::nullopt : std::optional(list);
}

using Integers = std::optional<at::ArrayRef<int64_t>>;
using Floats = std::optional<at::ArrayRef<double>>;
using Tensors = std::optional<at::TensorList>;
using Strings = std::optional<c10::List<std::string>>;

inline FeedForward network_of(at::TensorList weights, const Tensors& biases,
                              std::string_view activation, const Floats& activation_args,
                              const Strings& formats, const Integers& groups,
                              const Integers& columns, std::string_view arithmetic,
                              const Tensors& lora_a, const Tensors& lora_b,
                              const Floats& lora_scales, const Tensors& lora_masks) {
  FeedForward network{.weights = weights,
                      .biases = list_of(biases),
                      .activation = activation,
                      .activation_args = list_of(activation_args),
                      .lora = {.a = list_of(lora_a),
                               .b = list_of(lora_b),
                               .scales = list_of(lora_scales),
                               .masks = list_of(lora_masks)}};
  if (formats) {
    network.packed.emplace(PackedLayers{.formats = *formats,
                                        .groups = list_of(groups),
                                        .columns = list_of(columns),
                                        .arithmetic = arithmetic});
  }
  return network;
}

// Adapts kernel(x, routing, network, keep_hidden) to the dispatcher. The operator returns one list:
// torch.compile cannot write C++ for a list among several results.
template <auto kernel>
std::vector<Tensor> experts_of(const Tensor& x, const OptionalTensor& offsets,
                               const OptionalTensor& inverse, const OptionalTensor& token_offsets,
                               const OptionalTensor& gates, at::TensorList weights, Tensors biases,
                               std::string_view activation, bool keep_hidden,
                               Floats activation_args, Strings formats, Integers groups,
                               Integers columns, std::string_view arithmetic, Tensors lora_a,
                               Tensors lora_b, Floats lora_scales, Tensors lora_masks) {
  auto [y, list] = kernel(
      x,
      Routing{
          .offsets = offsets, .inverse = inverse, .token_offsets = token_offsets, .gates = gates},
      network_of(weights, biases, activation, activation_args, formats, groups, columns, arithmetic,
                 lora_a, lora_b, lora_scales, lora_masks),
      keep_hidden);
  list.insert(list.begin(), y);
  return list;
}

// Adapts kernel(grad_y, x, routing, network, hidden, needs_x, needs_parameters) to the dispatcher.
template <auto kernel>
std::vector<Tensor> experts_backward_of(
    const Tensor& grad_y, const Tensor& x, const OptionalTensor& offsets,
    const OptionalTensor& inverse, const OptionalTensor& token_offsets, const OptionalTensor& gates,
    at::TensorList weights, Tensors biases, at::TensorList hidden, std::string_view activation,
    bool needs_x, const c10::List<bool>& needs_parameters, Floats activation_args, Strings formats,
    Integers groups, Integers columns, Tensors lora_a, Tensors lora_b, Floats lora_scales,
    Tensors lora_masks) {
  auto [grad_x, grad_gates, list] = kernel(
      grad_y, x,
      Routing{
          .offsets = offsets, .inverse = inverse, .token_offsets = token_offsets, .gates = gates},
      network_of(weights, biases, activation, activation_args, formats, groups, columns, "exact",
                 lora_a, lora_b, lora_scales, lora_masks),
      hidden, needs_x, needs_parameters);
  list.insert(list.begin(), {grad_x, grad_gates});
  return list;
}

// Calls the operator through the dispatcher.
inline ExpertsOutputs call_experts(const Tensor& x, const Routing& routing,
                                   const FeedForward& network, bool keep_hidden) {
  static const PublicOperator<decltype(experts_of<nullptr>)> op("moe_ext::experts");
  const auto& [weights, biases, activation, activation_args, packed, lora] = network;
  const auto list = op.call(
      x, routing.offsets, routing.inverse, routing.token_offsets, routing.gates, weights,
      if_any(biases), activation, keep_hidden, if_any(activation_args),
      packed ? Strings(packed->formats) : std::nullopt,
      packed ? Integers(packed->groups) : std::nullopt,
      packed ? Integers(packed->columns) : std::nullopt, packed ? packed->arithmetic : "exact",
      if_any(lora.a), if_any(lora.b), if_any(lora.scales), if_any(lora.masks));
  return {list[0], {list.begin() + 1, list.end()}};
}

}  // namespace moe_ext
