// The arguments of experts and _experts_backward: as structs and as the dispatcher passes them.
//
// The dispatcher passes a flat list of arguments, in the order of the schemas in moe_ext.cpp. Only
// this header repeats that list; kernels, autograd and autocast use the structs.
#pragma once

#include <ATen/core/List.h>

#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "operator.h"
#include "routing.h"

namespace moe_ext {

// The format, the group and the number of columns of each layer with packed weights.
struct PackedLayers {
  c10::List<std::string> formats;
  at::ArrayRef<int64_t> groups, columns;
  std::string_view arithmetic = "exact";  // or "integer"; see cpu/gemm/integer.h

  bool is_integer() const { return arithmetic == "integer"; }
};

// The expert networks, all of one architecture: linear layers with an activation between them.
struct FeedForward {
  at::TensorList
      weights;            // [E, fan_in, columns] of each layer, contiguous or transposed; or packed
  at::TensorList biases;  // [E, columns] of each layer, or empty
  std::string_view activation;
  at::ArrayRef<double> activation_args;  // limit, alpha and offset, or empty
  const PackedLayers* packed = nullptr;

  const char* op() const { return packed == nullptr ? "experts" : "packed_experts"; }
  const char* backward_op() const {
    return packed == nullptr ? "_experts_backward" : "_packed_experts_backward";
  }
  c10::SymInt columns(size_t layer) const {
    return packed == nullptr ? weights[layer].sym_size(2) : packed->columns[layer];
  }
};

using ExpertsOutputs = std::tuple<Tensor, std::vector<Tensor>>;
// The gradients of x, of the gates, and of the parameters: the weights, then the biases.
using ExpertsGradients = std::tuple<Tensor, Tensor, std::vector<Tensor>>;

inline FeedForward network_of(at::TensorList weights, std::optional<at::TensorList> biases,
                              std::string_view activation,
                              std::optional<at::ArrayRef<double>> activation_args,
                              const PackedLayers* packed = nullptr) {
  return {.weights = weights,
          .biases = biases.value_or(at::TensorList()),
          .activation = activation,
          .activation_args = activation_args.value_or(at::ArrayRef<double>()),
          .packed = packed};
}

// Adapts kernel(x, routing, network, keep_hidden) to the dispatcher. The operator returns one list:
// torch.compile cannot write C++ for a list among several results.
template <auto kernel>
std::vector<Tensor> experts_of(const Tensor& x, const OptionalTensor& offsets,
                               const OptionalTensor& inverse, const OptionalTensor& token_offsets,
                               const OptionalTensor& gates, at::TensorList weights,
                               std::optional<at::TensorList> biases, std::string_view activation,
                               bool keep_hidden,
                               std::optional<at::ArrayRef<double>> activation_args) {
  auto [y, list] = kernel(
      x,
      Routing{
          .offsets = offsets, .inverse = inverse, .token_offsets = token_offsets, .gates = gates},
      network_of(weights, biases, activation, activation_args), keep_hidden);
  list.insert(list.begin(), y);
  return list;
}

// Adapts kernel(grad_y, x, routing, network, hidden, needs_x, needs_parameters) to the dispatcher.
template <auto kernel>
std::vector<Tensor> experts_backward_of(
    const Tensor& grad_y, const Tensor& x, const OptionalTensor& offsets,
    const OptionalTensor& inverse, const OptionalTensor& token_offsets, const OptionalTensor& gates,
    at::TensorList weights, std::optional<at::TensorList> biases, at::TensorList hidden,
    std::string_view activation, bool needs_x, const c10::List<bool>& needs_parameters,
    std::optional<at::ArrayRef<double>> activation_args) {
  auto [grad_x, grad_gates, list] = kernel(
      grad_y, x,
      Routing{
          .offsets = offsets, .inverse = inverse, .token_offsets = token_offsets, .gates = gates},
      network_of(weights, biases, activation, activation_args), hidden, needs_x, needs_parameters);
  list.insert(list.begin(), {grad_x, grad_gates});
  return list;
}

// Adapts the same kernels to packed_experts and _packed_experts_backward. The gradients of the
// parameters are those of the biases alone.
template <auto kernel>
std::vector<Tensor> packed_experts_of(
    const Tensor& x, const OptionalTensor& offsets, const OptionalTensor& inverse,
    const OptionalTensor& token_offsets, const OptionalTensor& gates, at::TensorList weights,
    const c10::List<std::string>& formats, at::IntArrayRef groups, at::IntArrayRef columns,
    std::optional<at::TensorList> biases, std::string_view activation, bool keep_hidden,
    std::optional<at::ArrayRef<double>> activation_args, std::string_view arithmetic) {
  const PackedLayers packed{
      .formats = formats, .groups = groups, .columns = columns, .arithmetic = arithmetic};
  auto [y, list] = kernel(
      x,
      Routing{
          .offsets = offsets, .inverse = inverse, .token_offsets = token_offsets, .gates = gates},
      network_of(weights, biases, activation, activation_args, &packed), keep_hidden);
  list.insert(list.begin(), y);
  return list;
}

template <auto kernel>
std::vector<Tensor> packed_experts_backward_of(
    const Tensor& grad_y, const Tensor& x, const OptionalTensor& offsets,
    const OptionalTensor& inverse, const OptionalTensor& token_offsets, const OptionalTensor& gates,
    at::TensorList weights, const c10::List<std::string>& formats, at::IntArrayRef groups,
    at::IntArrayRef columns, std::optional<at::TensorList> biases, at::TensorList hidden,
    std::string_view activation, bool needs_x, const c10::List<bool>& needs_biases,
    std::optional<at::ArrayRef<double>> activation_args) {
  const PackedLayers packed{.formats = formats, .groups = groups, .columns = columns};
  c10::List<bool> needs_parameters;
  for (size_t l = 0; l < weights.size(); ++l) needs_parameters.push_back(false);
  needs_parameters.append(needs_biases);
  auto [grad_x, grad_gates, list] = kernel(
      grad_y, x,
      Routing{
          .offsets = offsets, .inverse = inverse, .token_offsets = token_offsets, .gates = gates},
      network_of(weights, biases, activation, activation_args, &packed), hidden, needs_x,
      needs_parameters);
  std::vector<Tensor> gradients{grad_x, grad_gates};
  gradients.insert(gradients.end(), list.begin() + static_cast<int64_t>(weights.size()),
                   list.end());
  return gradients;
}

template <typename T>
std::optional<at::ArrayRef<T>> if_any(at::ArrayRef<T> list) {
  return list.empty() ? std::nullopt : std::optional(list);
}

// call_experts and call_experts_backward call the operators through the dispatcher.
inline ExpertsOutputs call_experts(const Tensor& x, const Routing& routing,
                                   const FeedForward& network, bool keep_hidden) {
  if (const PackedLayers* packed = network.packed) {
    static const PublicOperator<decltype(packed_experts_of<nullptr>)> op("moe_ext::packed_experts");
    const auto list = op.call(x, routing.offsets, routing.inverse, routing.token_offsets,
                              routing.gates, network.weights, packed->formats, packed->groups,
                              packed->columns, if_any(network.biases), network.activation,
                              keep_hidden, if_any(network.activation_args), packed->arithmetic);
    return {list[0], {list.begin() + 1, list.end()}};
  }
  static const PublicOperator<decltype(experts_of<nullptr>)> op("moe_ext::experts");
  const auto list = op.call(x, routing.offsets, routing.inverse, routing.token_offsets,
                            routing.gates, network.weights, if_any(network.biases),
                            network.activation, keep_hidden, if_any(network.activation_args));
  return {list[0], {list.begin() + 1, list.end()}};
}

inline ExpertsGradients call_experts_backward(const Tensor& grad_y, const Tensor& x,
                                              const Routing& routing, const FeedForward& network,
                                              at::TensorList hidden, bool needs_x,
                                              const c10::List<bool>& needs_parameters) {
  if (const PackedLayers* packed = network.packed) {
    static const auto op = find_operator<decltype(packed_experts_backward_of<nullptr>)>(
        "moe_ext::_packed_experts_backward");
    const auto num_layers = static_cast<int64_t>(network.weights.size());
    c10::List<bool> needs_biases;
    for (size_t i = num_layers; i < needs_parameters.size(); ++i) {
      needs_biases.push_back(needs_parameters[i]);
    }
    auto list = op.call(grad_y, x, routing.offsets, routing.inverse, routing.token_offsets,
                        routing.gates, network.weights, packed->formats, packed->groups,
                        packed->columns, if_any(network.biases), hidden, network.activation,
                        needs_x, needs_biases, if_any(network.activation_args));
    std::vector<Tensor> parameters(num_layers);  // no gradients of codes
    parameters.insert(parameters.end(), list.begin() + 2, list.end());
    return {list[0], list[1], parameters};
  }
  static const auto op =
      find_operator<decltype(experts_backward_of<nullptr>)>("moe_ext::_experts_backward");
  const auto list =
      op.call(grad_y, x, routing.offsets, routing.inverse, routing.token_offsets, routing.gates,
              network.weights, if_any(network.biases), hidden, network.activation, needs_x,
              needs_parameters, if_any(network.activation_args));
  return {list[0], list[1], {list.begin() + 2, list.end()}};
}

}  // namespace moe_ext
