// experts: the checks of its arguments, its outputs, and its input as kernels read it.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "activation.h"
#include "experts_arguments.h"
#include "kernels/experts.h"
#include "packed_layouts.h"
#include "routing.h"

namespace moe_ext {

// Returns whether the matrices of a weight are stored transposed: the weight is a view p.mT of a
// contiguous p [E, columns, fan_in].
inline bool is_transposed(const Tensor& weight) {
  return weight.dim() == 3 && !weight.is_contiguous() && weight.mT().is_contiguous();
}

// Returns a weight that the kernels can read: contiguous or transposed. Copies it only if it is
// neither.
inline Tensor in_known_layout(const Tensor& weight) {
  return is_transposed(weight) ? weight : weight.contiguous();
}

// Returns a bias that the kernels can read. Its negative bit is resolved here: the dispatcher does
// not look for it in an optional list.
inline Tensor readable_bias(const Tensor& bias) { return bias.resolve_neg().contiguous(); }

// The same for a matrix of LoRA, which may be transposed.
inline Tensor readable_lora(const Tensor& matrix) { return in_known_layout(matrix.resolve_neg()); }

// Returns R.
inline c10::SymInt num_rows_of(const Tensor& x, const Routing& routing) {
  return routing.inverse ? routing.inverse->sym_numel() : x.sym_size(0);
}

// Returns whether a layer has a low-rank adapter.
inline bool has_lora(const LoraLayers& lora, size_t layer) {
  return !lora.a.empty() && (lora.a[layer].dim() != 1 || lora.b[layer].dim() != 1 ||
                             lora.a[layer].sym_size(0) != 0 || lora.b[layer].sym_size(0) != 0);
}

// Returns whether a layer has a mask of its adapter's inputs.
inline bool has_mask(const LoraLayers& lora, size_t layer) {
  return !lora.masks.empty() &&
         (lora.masks[layer].dim() != 1 || lora.masks[layer].sym_size(0) != 0);
}

inline void check_feed_forward(const char* op, const Tensor& x, const c10::SymInt& num_rows,
                               const FeedForward& network) {
  const auto& [weights, biases, activation, activation_args, packed, lora] = network;
  const bool gated = check_activation(op, activation, activation_args);
  TORCH_CHECK_VALUE(
      !weights.empty() && (biases.empty() || biases.size() == weights.size()), op,
      ": weights and biases must have one tensor for each linear layer (biases may be "
      "empty), got ",
      weights.size(), " weights and ", biases.size(), " biases");
  if (packed) {
    check_packed_layers(op, weights, *packed);
    TORCH_CHECK_TYPE(!packed->is_integer() || x.scalar_type() != at::kDouble, op,
                     ": x must not be float64 in integer arithmetic, got float64");
    TORCH_CHECK_VALUE(!packed->is_integer() || x.is_cpu() || x.is_meta(), op,
                      ": x must be on cpu in integer arithmetic, got ", x.device());
  } else {
    check_dim(op, "weights[0]", weights[0], 3);
    check_floating(op, "weights[0]", weights[0]);
    const auto type = weights[0].scalar_type();
    TORCH_CHECK_TYPE(x.scalar_type() == type, op, ": x must have the dtype of the weights, ",
                     name_of(type), ", got ", name_of(x.scalar_type()));
  }
  for (const auto& [name, size] :
       {std::pair("lora_a", lora.a.size()),
        {"lora_b", lora.b.size()},
        {"lora_scales", lora.scales.size()},
        {"lora_masks", lora.masks.empty() ? lora.a.size() : lora.masks.size()}}) {
    TORCH_CHECK_VALUE(size == lora.a.size() && (size == 0 || size == weights.size()), op, ": ",
                      name, " must be empty or have one value for each of ", weights.size(),
                      " weights, as lora_a has, got ", size);
  }
  const auto type = x.scalar_type();
  const auto num_experts = weights[0].sym_size(0);
  c10::SymInt width = x.sym_size(1);
  for (size_t l = 0; l < weights.size(); ++l) {
    // Not c10::str, whose stream takes longer than the other checks.
    const auto name = [&](const char* list) {
      return std::string(list) + "[" + std::to_string(l) + "]";
    };
    if (packed) {
      check_packed_weight(op, name("weights").c_str(), weights[l], x, num_experts,
                          packed_layout(op, *packed, l, width));
    } else {
      check_dim(op, name("weights").c_str(), weights[l], 3);
      check_argument(op, name("weights").c_str(), weights[l], x, type,
                     {num_experts, width, weights[l].sym_size(2)});
    }
    const auto columns = network.columns(l);
    if (!biases.empty()) {
      check_argument(op, name("biases").c_str(), biases[l], x, type, {num_experts, columns});
    }
    if (has_lora(lora, l)) {
      check_dim(op, name("lora_a").c_str(), lora.a[l], 3);
      const auto rank = lora.a[l].sym_size(2);
      if (has_mask(lora, l)) {
        check_argument(op, name("lora_masks").c_str(), lora.masks[l], x, at::kBool,
                       {num_rows, width});
      }
      check_argument(op, name("lora_a").c_str(), lora.a[l], x, type, {num_experts, width, rank});
      check_argument(op, name("lora_b").c_str(), lora.b[l], x, type, {num_experts, rank, columns});
    }
    const bool halved = gated && l + 1 < weights.size();
    TORCH_CHECK_VALUE(!halved || columns % 2 == 0, op, ": weights[", l,
                      "] must have an even number of columns before ", activation, ", got ",
                      columns);
    width = halved ? columns / 2 : columns;
  }
}

inline void check_experts(const char* op, const Tensor& x, const Routing& routing,
                          const FeedForward& network) {
  check_dim(op, "x", x, 2);
  check_floating(op, "x", x);
  check_feed_forward(op, x, num_rows_of(x, routing), network);
  const auto& [offsets, inverse, token_offsets, gates] = routing;
  TORCH_CHECK_VALUE(inverse || (!token_offsets && !gates), op,
                    ": inverse must be given if token_offsets or gates are given, got None");
  if (inverse) {
    check_shape(op, "x", x, {check_slots(op, *inverse, token_offsets, x), x.sym_size(1)});
  }
  if (gates) {
    check_device(op, "gates", *gates, x);
    check_floating(op, "gates", *gates);
    check_shape(op, "gates", *gates, inverse->sym_sizes());
  }
  const auto num_experts = network.weights[0].sym_size(0);
  const auto num_rows = num_rows_of(x, routing);
  if (offsets) {
    check_index(op, "offsets", *offsets, x, {num_experts + 1});
    TORCH_CHECK_VALUE(
        num_experts > 0 || num_rows == 0, op,
        ": offsets must cover at least one expert when x has rows, got 0 experts and ", num_rows,
        " rows");
  } else {
    TORCH_CHECK_VALUE(num_experts > 0 && num_rows % num_experts == 0, op,
                      ": without offsets the number of rows must be a multiple of num_experts = ",
                      num_experts, ", got ", num_rows);
  }
}

// The shape of y: [T, width] with gates, else [R, width].
inline c10::SymDimVector experts_shape(const Tensor& x, const Routing& routing,
                                       const FeedForward& network) {
  return {routing.gates ? x.sym_size(0) : num_rows_of(x, routing),
          network.columns(network.weights.size() - 1)};
}

inline Tensor experts_output(Empty& empty, const Tensor& x, const Routing& routing,
                             const FeedForward& network) {
  return empty(x, experts_shape(x, routing, network), x.scalar_type());
}

// Creates the pre-activations [R, columns] of each layer but the last; none unless keep_hidden.
inline std::vector<Tensor> experts_hidden(Empty& empty, const Tensor& x, const Routing& routing,
                                          const FeedForward& network, bool keep_hidden) {
  std::vector<Tensor> hidden;
  for (size_t l = 0; keep_hidden && l + 1 < network.weights.size(); ++l) {
    hidden.push_back(empty(x, {num_rows_of(x, routing), network.columns(l)}, x.scalar_type()));
  }
  return hidden;
}

inline void check_experts_backward(const Tensor& grad_y, const Tensor& x, const Routing& routing,
                                   const FeedForward& network, at::TensorList hidden,
                                   const c10::List<bool>& needs_parameters) {
  constexpr auto* op = "_experts_backward";
  check_experts(op, x, routing, network);
  const auto type = x.scalar_type();
  check_argument(op, "grad_y", grad_y, x, type, experts_shape(x, routing, network));
  const auto& weights = network.weights;
  TORCH_CHECK_VALUE(hidden.empty() || hidden.size() + 1 == weights.size(), op,
                    ": hidden must be empty or have one tensor for each hidden layer, got ",
                    hidden.size());
  size_t num_parameters = 0;
  for (const at::TensorList list : network.parameters()) num_parameters += list.size();
  TORCH_CHECK_VALUE(needs_parameters.size() == num_parameters, op,
                    ": needs_parameters must have one value for each of ", num_parameters,
                    " parameters, got ", needs_parameters.size());
  for (size_t l = 0; network.packed && l < weights.size(); ++l) {
    TORCH_CHECK_VALUE(!needs_parameters[network.places().weight(l)], op, ": needs_parameters[", l,
                      "] must be false for a packed weight, got true");
  }
  for (size_t l = 0; l < hidden.size(); ++l) {
    check_argument(op, "hidden", hidden[l], x, type, {num_rows_of(x, routing), network.columns(l)});
  }
}

// The gradients of x and of the gates have shape [0] if they are not needed.
inline Tensor experts_gradient_of_x(Empty& empty, const Tensor& x, bool needs_x) {
  return needs_x ? empty_of(empty, x) : empty(x, {0}, x.scalar_type());
}

inline Tensor experts_gradient_of_gates(Empty& empty, const Tensor& x,
                                        const OptionalTensor& gates) {
  return gates ? empty_of(empty, *gates) : empty(x, {0}, accumulate_type(x));
}

// Returns the first layer with a parameter that needs a gradient; the number of layers if there is
// none.
inline int64_t first_learned_layer(const FeedForward& network,
                                   const c10::List<bool>& needs_parameters) {
  const auto places = network.places();
  size_t first = places.num_layers;
  for (size_t i = 0; i < needs_parameters.size(); ++i) {
    if (needs_parameters[i]) first = std::min(first, places.layer_of(i));
  }
  return static_cast<int64_t>(first);
}

// Creates the gradient of a parameter in the memory layout of the parameter; shape [0] if it is not
// needed.
inline Tensor experts_gradient_of(Empty& empty, const Tensor& parameter, bool needed) {
  if (!needed) return empty(parameter, {0}, parameter.scalar_type());
  if (is_transposed(parameter)) return empty_of(empty, parameter.mT()).mT();
  return empty_of(empty, parameter);
}

// Creates the gradients of the parameters.
inline std::vector<Tensor> experts_gradients_of(Empty& empty, const FeedForward& network,
                                                const c10::List<bool>& needs_parameters) {
  std::vector<Tensor> gradients;
  for (const at::TensorList parameters : network.parameters()) {
    for (const Tensor& each : parameters) {
      gradients.push_back(experts_gradient_of(empty, each, needs_parameters[gradients.size()]));
    }
  }
  return gradients;
}

// The source of the rows as kernels read it.
class InputTensors {
 public:
  InputTensors(const char* op, const Tensor& x, const Routing& routing, bool check_values)
      : x_(x.contiguous()), offsets_(contiguous_index(routing.offsets)) {
    if (routing.inverse) {
      slots_.emplace(op, *routing.inverse, routing.token_offsets, check_values);
    }
    if (routing.offsets && check_values) check_offsets(op, "offsets", offsets_, num_rows());
  }

  int64_t num_rows() const { return slots_ ? slots_->slots.num_slots : x_.size(0); }
  const Slots& slots() const { return slots_->slots; }
  const Tensor& x() const { return x_; }
  const Tensor& offsets() const { return offsets_; }  // undefined if every expert has R / E rows

  template <typename scalar_t>
  ExpertInput<scalar_t> input() const {
    return {.x = x_.const_data_ptr<scalar_t>(),
            .slots = slots_ ? std::optional(slots_->slots) : std::nullopt,
            .offsets = data_of<int64_t>(offsets_),
            .num_rows = num_rows()};
  }

 private:
  Tensor x_, offsets_;
  std::optional<SlotTensors> slots_;
};

}  // namespace moe_ext
