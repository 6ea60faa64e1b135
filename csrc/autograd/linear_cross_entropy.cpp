#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <string>

#include "../linear_cross_entropy_arguments.h"
#include "function.h"

namespace moe_ext::autograd {
namespace {

// Returns whether the gradient of the loss is exactly 1, as in loss.backward(). Only a number in
// the memory of the CPU is read: a compiler has no values, and a GPU would have to be waited for.
bool is_one(const Tensor& grad) {
  return grad.is_cpu() && !at::isTensorSubclassLike(grad) && grad.item<double>() == 1;
}

struct LinearCrossEntropy : OperatorFunction<LinearCrossEntropy, "linear_cross_entropy",
                                             decltype(linear_cross_entropy_of<nullptr>)> {
  // Returns the loss, the log-sum-exp and the kept gradients; only the loss is differentiable.
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                               const Tensor& target, const OptionalTensor& bias,
                               std::string_view reduction, int64_t ignore_index,
                               double label_smoothing, double z_loss, std::optional<double> softcap,
                               const c10::List<bool>& keep_gradients) {
    variable_list outputs = call(input, weight, target, bias, reduction, ignore_index,
                                 label_smoothing, z_loss, softcap, keep_gradients);
    const c10::List<bool> needs(
        {input.requires_grad(), weight.requires_grad(), bias && bias->requires_grad()});
    bool kept = reduction != "none";  // LossOptions::reduces
    for (size_t i = 0; i < needs.size(); ++i) kept = kept && (keep_gradients[i] || !needs[i]);
    variable_list saved{input, weight, target, or_undefined(bias), outputs[1]};
    if (kept) saved.insert(saved.end(), outputs.begin() + 2, outputs.end());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["reduction"] = std::string(reduction);
    ctx->saved_data["ignore_index"] = ignore_index;
    ctx->saved_data["label_smoothing"] = label_smoothing;
    ctx->saved_data["z_loss"] = z_loss;
    ctx->saved_data["softcap"] = softcap;
    ctx->saved_data["needs"] = needs;
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
    static const BackwardOperator<decltype(linear_cross_entropy_backward_of<nullptr>)> op(
        "moe_ext::_linear_cross_entropy_backward");
    auto& data = ctx->saved_data;
    return take(op.call(grads[0], saved[0], saved[1], saved[2], if_defined(saved[3]),
                        data["reduction"].toStringRef(), data["ignore_index"].toInt(),
                        data["label_smoothing"].toDouble(), data["z_loss"].toDouble(),
                        data["softcap"].toOptional<double>(), saved[4], kept, needs));
  }
};

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) {
  moe_ext::autograd::LinearCrossEntropy::implement(m);
  m.impl("_linear_cross_entropy_backward", moe_ext::autograd::no_second_derivative());
}
