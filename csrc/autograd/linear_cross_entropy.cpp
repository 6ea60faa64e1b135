#include "../linear_cross_entropy.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <string>

#include "function.h"

namespace moe_ext::autograd {
namespace {

std::vector<Tensor> call_linear_cross_entropy_backward(const Tensor& grad_loss,
                                                       const Classifier& classifier,
                                                       const LossOptions& options,
                                                       const Tensor& lse, at::TensorList gradients,
                                                       const c10::List<bool>& needs) {
  static const BackwardOperator<decltype(linear_cross_entropy_backward_of<nullptr>)> op(
      "moe_ext::_linear_cross_entropy_backward");
  return op.call(grad_loss, classifier.input, classifier.weight, classifier.target, classifier.bias,
                 options.reduction, options.ignore_index, options.label_smoothing, options.z_loss,
                 options.softcap, lse, gradients, needs);
}

// Returns whether the gradient of the loss is exactly 1, as in loss.backward(). Only a number in
// the memory of the CPU is read: a compiler has no values, and a GPU would have to be waited for.
bool is_one(const Tensor& grad) {
  return grad.is_cpu() && !at::isTensorSubclassLike(grad) && grad.item<double>() == 1;
}

struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
  static constexpr bool is_traceable = true;

  // Returns the loss, the log-sum-exp and the kept gradients; only the loss is differentiable.
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                               const Tensor& target, const OptionalTensor& bias,
                               const std::string& reduction, int64_t ignore_index,
                               double label_smoothing, double z_loss, std::optional<double> softcap,
                               const c10::List<bool>& keep_gradients) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const LossOptions options{.reduction = reduction,
                              .ignore_index = ignore_index,
                              .label_smoothing = label_smoothing,
                              .z_loss = z_loss,
                              .softcap = softcap};
    const auto [loss, lse, gradients] = call_linear_cross_entropy(
        {.input = input, .weight = weight, .target = target, .bias = bias}, options,
        keep_gradients);
    const c10::List<bool> needs(
        {input.requires_grad(), weight.requires_grad(), bias && bias->requires_grad()});
    bool kept = options.reduces();
    for (size_t i = 0; i < needs.size(); ++i) kept = kept && (keep_gradients[i] || !needs[i]);
    variable_list saved{input, weight, target, or_undefined(bias), lse};
    if (kept) saved.insert(saved.end(), gradients.begin(), gradients.end());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["reduction"] = reduction;
    ctx->saved_data["ignore_index"] = ignore_index;
    ctx->saved_data["label_smoothing"] = label_smoothing;
    ctx->saved_data["z_loss"] = z_loss;
    ctx->saved_data["softcap"] = softcap;
    ctx->saved_data["needs"] = needs;
    variable_list outputs{loss, lse};
    outputs.insert(outputs.end(), gradients.begin(), gradients.end());
    ctx->mark_non_differentiable({outputs.begin() + 1, outputs.end()});
    ctx->set_materialize_grads(false);  // no zero gradients of the size of the gradients
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    constexpr size_t kInputs = 10;
    variable_list results(kInputs);
    if (!grads[0].defined()) return results;
    const auto saved = ctx->get_saved_variables();
    const auto needs = ctx->saved_data["needs"].toBoolList();
    const auto kept = at::TensorList(saved).slice(5);
    const auto take = [&](const auto& gradients) {
      if (needs[0]) results[0] = gradients[0];
      if (needs[1]) results[1] = gradients[1];
      if (needs[2]) results[3] = gradients[2];
      return results;
    };
    // The factor 1 would cost a copy of the gradients. With retain_graph, another backward pass
    // needs them unchanged. A second derivative needs the operator, to be refused.
    const bool same_type = !kept.empty() && saved[0].scalar_type() == accumulate_type(saved[0]);
    const bool last = !torch::autograd::get_current_graph_task_keep_graph();
    if (same_type && last && !at::GradMode::is_enabled() && is_one(grads[0])) return take(kept);
    const OptionalTensor bias = if_defined(saved[3]);
    const auto softcap = ctx->saved_data["softcap"].toOptional<double>();
    return take(call_linear_cross_entropy_backward(
        grads[0], {.input = saved[0], .weight = saved[1], .target = saved[2], .bias = bias},
        {.reduction = ctx->saved_data["reduction"].toStringRef(),
         .ignore_index = ctx->saved_data["ignore_index"].toInt(),
         .label_smoothing = ctx->saved_data["label_smoothing"].toDouble(),
         .z_loss = ctx->saved_data["z_loss"].toDouble(),
         .softcap = softcap},
        saved[4], kept, needs));
  }
};

LinearCrossEntropyOutputs linear_cross_entropy(const Classifier& classifier,
                                               const LossOptions& options,
                                               const c10::List<bool>& keep_gradients) {
  const auto& [input, weight, target, bias] = classifier;
  const auto out = LinearCrossEntropy::apply(
      input, weight, target, bias, std::string(options.reduction), options.ignore_index,
      options.label_smoothing, options.z_loss, options.softcap, keep_gradients);
  return {out[0], out[1], {out.begin() + 2, out.end()}};
}

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  moe_ext::autograd::differentiable<
      "linear_cross_entropy",
      &moe_ext::linear_cross_entropy_of<moe_ext::autograd::linear_cross_entropy>>(m);
  m.impl("_linear_cross_entropy_backward", moe_ext::autograd::no_second_derivative());
}
