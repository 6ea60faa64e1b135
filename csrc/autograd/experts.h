// Calls _experts_backward, which several derivatives need.
#pragma once

#include "../experts_arguments.h"
#include "function.h"

namespace moe_ext::autograd {

inline ExpertsGradients call_experts_backward(const Tensor& grad_y, const Tensor& x,
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

}  // namespace moe_ext::autograd
