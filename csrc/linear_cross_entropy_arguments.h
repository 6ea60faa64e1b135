// The arguments of linear_cross_entropy and its backward pass: as structs and as the dispatcher
// passes them.
#pragma once

#include <ATen/core/List.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "find_operator.h"
#include "tensor.h"

namespace moe_ext {

// The linear layer and the targets of its outputs.
struct Classifier {
  const Tensor& input;   // [T, D]
  const Tensor& weight;  // [V, D]
  const Tensor& target;  // [T], in [0, V) or ignore_index
  const OptionalTensor& bias;

  c10::SymInt num_tokens() const { return input.sym_size(0); }
  c10::SymInt num_classes() const { return weight.sym_size(0); }
};

// The loss of a token, and how the tokens are reduced.
struct LossOptions {
  std::string_view reduction;  // "none", "mean" or "sum"
  int64_t ignore_index;
  double label_smoothing;
  double z_loss;
  std::optional<double> softcap;

  bool reduces() const { return reduction != "none"; }
};

// The loss, the log-sum-exp of each token, and the gradients of input, weight and bias.
using LinearCrossEntropyOutputs = std::tuple<Tensor, Tensor, std::vector<Tensor>>;

// Adapts kernel(classifier, options, keep_gradients) to the dispatcher. The operator returns one
// list, as that of the experts does.
template <auto kernel>
std::vector<Tensor> linear_cross_entropy_of(const Tensor& input, const Tensor& linear_weight,
                                            const Tensor& target, const OptionalTensor& linear_bias,
                                            std::string_view reduction, int64_t ignore_index,
                                            double label_smoothing, double z_loss,
                                            std::optional<double> softcap,
                                            const c10::List<bool>& keep_gradients) {
  auto [loss, lse, list] = kernel(
      Classifier{.input = input, .weight = linear_weight, .target = target, .bias = linear_bias},
      LossOptions{.reduction = reduction,
                  .ignore_index = ignore_index,
                  .label_smoothing = label_smoothing,
                  .z_loss = z_loss,
                  .softcap = softcap},
      keep_gradients);
  list.insert(list.begin(), {loss, lse});
  return list;
}

// Adapts kernel(grad_loss, classifier, options, lse, gradients, needs) to the dispatcher.
template <auto kernel>
std::vector<Tensor> linear_cross_entropy_backward_of(
    const Tensor& grad_loss, const Tensor& input, const Tensor& linear_weight, const Tensor& target,
    const OptionalTensor& linear_bias, std::string_view reduction, int64_t ignore_index,
    double label_smoothing, double z_loss, std::optional<double> softcap, const Tensor& lse,
    at::TensorList gradients, const c10::List<bool>& needs) {
  return kernel(
      grad_loss,
      Classifier{.input = input, .weight = linear_weight, .target = target, .bias = linear_bias},
      LossOptions{.reduction = reduction,
                  .ignore_index = ignore_index,
                  .label_smoothing = label_smoothing,
                  .z_loss = z_loss,
                  .softcap = softcap},
      lse, gradients, needs);
}

// Calls the operator through the dispatcher.
inline LinearCrossEntropyOutputs call_linear_cross_entropy(const Classifier& classifier,
                                                           const LossOptions& options,
                                                           const c10::List<bool>& keep_gradients) {
  static const PublicOperator<decltype(linear_cross_entropy_of<nullptr>)> op(
      "moe_ext::linear_cross_entropy");
  const auto list = op.call(classifier.input, classifier.weight, classifier.target, classifier.bias,
                            options.reduction, options.ignore_index, options.label_smoothing,
                            options.z_loss, options.softcap, keep_gradients);
  return {list[0], list[1], {list.begin() + 2, list.end()}};
}

}  // namespace moe_ext
