// Meta kernels: the shapes and types of the outputs, for torch.compile, export and the meta device.
#include <torch/library.h>

#include <tuple>

#include "balanced_gating.h"
#include "combine.h"
#include "cv_squared.h"
#include "dispatch.h"
#include "experts.h"
#include "factored.h"
#include "gating.h"
#include "importance.h"
#include "linear_cross_entropy.h"
#include "load.h"
#include "lstm.h"
#include "lstm_cell.h"
#include "topk_routing.h"

namespace moe_ext {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> noisy_topk_gating_meta(
    const Tensor& clean_logits, const OptionalTensor& raw_noise_stddev, const OptionalTensor& noise,
    c10::SymInt k, double noise_epsilon) {
  check_noisy_topk_gating("noisy_topk_gating", clean_logits, raw_noise_stddev, noise, k,
                          noise_epsilon);
  return noisy_topk_gating_outputs(empty, clean_logits, noise, k);
}

std::tuple<Tensor, Tensor> noisy_topk_gating_backward_meta(
    const OptionalTensor& grad_gates, const OptionalTensor& grad_threshold,
    const OptionalTensor& grad_noise_stddev, const Tensor& gates, const Tensor& expert_index,
    const Tensor& threshold_index, const Tensor& clean_logits,
    const OptionalTensor& raw_noise_stddev, const OptionalTensor& noise) {
  check_noisy_topk_gating_backward(grad_gates, grad_threshold, grad_noise_stddev, gates,
                                   expert_index, threshold_index, clean_logits, raw_noise_stddev,
                                   noise);
  return noisy_topk_gating_gradients(empty, clean_logits, noise);
}

std::tuple<Tensor, Tensor> topk_routing_meta(const Tensor& logits, c10::SymInt k,
                                             const OptionalTensor& bias, std::string_view score,
                                             bool renormalize, double scale, c10::SymInt num_groups,
                                             c10::SymInt groups_per_token,
                                             c10::SymInt group_score_k,
                                             const OptionalTensor& given) {
  check_topk_routing(logits, k, bias, {score, renormalize, scale},
                     {num_groups, groups_per_token, group_score_k}, given);
  return topk_routing_outputs(empty, logits, k);
}

Tensor topk_routing_backward_meta(const Tensor& grad_gates, const Tensor& logits,
                                  const Tensor& expert_index, std::string_view score,
                                  bool renormalize, double scale) {
  check_topk_routing_backward(grad_gates, logits, expert_index, {score, renormalize, scale});
  return empty_of(empty, logits);
}

Tensor load_meta(const Tensor& clean_logits, const Tensor& noise_stddev, const Tensor& threshold,
                 const Tensor& expert_index, const OptionalTensor& group_offsets) {
  check_load("load", clean_logits, noise_stddev, threshold, expert_index, group_offsets);
  return load_output(empty, clean_logits, group_offsets);
}

std::tuple<Tensor, Tensor, Tensor> load_backward_meta(
    const Tensor& grad_load, const Tensor& clean_logits, const Tensor& noise_stddev,
    const Tensor& threshold, const Tensor& expert_index, const OptionalTensor& group_offsets) {
  check_load_backward(grad_load, clean_logits, noise_stddev, threshold, expert_index,
                      group_offsets);
  return load_gradients(empty, clean_logits, noise_stddev, threshold);
}

std::tuple<Tensor, Tensor> batchwise_topm_meta(const Tensor& scores, c10::SymInt m,
                                               c10::SymInt first_expert,
                                               std::optional<c10::SymInt> num_experts) {
  check_batchwise_topm(scores, m, first_expert, num_experts);
  return batchwise_topm_outputs(empty, scores, m);
}

Tensor selected_softmax_meta(const Tensor& logits, const Tensor& expert_index,
                             const Tensor& token_offsets) {
  check_selected_softmax(logits, expert_index, token_offsets);
  return selected_softmax_output(empty, logits, expert_index);
}

Tensor selected_softmax_backward_meta(const Tensor& grad_gates, const Tensor& gates,
                                      const Tensor& expert_index, const Tensor& token_offsets,
                                      c10::SymInt num_experts) {
  check_selected_softmax_backward(grad_gates, gates, expert_index, token_offsets, num_experts);
  return selected_softmax_gradient(empty, gates, token_offsets, num_experts);
}

Tensor importance_meta(const Tensor& gates, const Tensor& expert_index, c10::SymInt num_experts) {
  check_importance("importance", gates, expert_index, num_experts);
  return importance_output(empty, gates, num_experts);
}

std::tuple<Tensor, Tensor> importance_and_load_meta(const Tensor& gates, const Tensor& expert_index,
                                                    c10::SymInt num_experts) {
  check_importance("importance_and_load", gates, expert_index, num_experts);
  return {importance_output(empty, gates, num_experts),
          importance_output(empty, gates, num_experts)};
}

Tensor weighted_cv_squared_meta(at::TensorList values, at::ArrayRef<double> weights) {
  check_weighted_cv_squared("weighted_cv_squared", values, weights);
  return weighted_cv_squared_output(empty, values);
}

std::vector<Tensor> weighted_cv_squared_backward_meta(const Tensor& grad, at::TensorList values,
                                                      at::ArrayRef<double> weights) {
  check_weighted_cv_squared_backward(grad, values, weights);
  return weighted_cv_squared_gradients(empty, values);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dispatch_plan_meta(const Tensor& expert_index,
                                                              c10::SymInt num_experts) {
  check_dispatch_plan(expert_index, num_experts);
  return dispatch_plan_outputs(empty, expert_index, num_experts);
}

Tensor dispatch_meta(const Tensor& x, const Tensor& inverse, const OptionalTensor& token_offsets) {
  check_dispatch(x, inverse, token_offsets);
  return dispatch_output(empty, x, inverse);
}

Tensor dispatch_backward_meta(const Tensor& grad_rows, const Tensor& inverse,
                              const OptionalTensor& token_offsets) {
  check_dispatch_backward(grad_rows, inverse, token_offsets);
  return dispatch_gradient(empty, grad_rows, inverse, token_offsets);
}

Tensor combine_meta(const Tensor& expert_output, const Tensor& gates, const Tensor& inverse,
                    const OptionalTensor& token_offsets) {
  check_combine("combine", expert_output, gates, inverse, token_offsets);
  return combine_output(empty, expert_output, inverse, token_offsets);
}

std::tuple<Tensor, Tensor> combine_backward_meta(const Tensor& grad_y, const Tensor& expert_output,
                                                 const Tensor& gates, const Tensor& inverse,
                                                 const OptionalTensor& token_offsets) {
  check_combine_backward(grad_y, expert_output, gates, inverse, token_offsets);
  return combine_gradients(empty, expert_output, gates);
}

ExpertsOutputs experts_meta(const Tensor& x, const Routing& routing, const FeedForward& network,
                            bool keep_hidden) {
  check_experts(network.op(), x, routing, network);
  return {experts_output(empty, x, routing, network),
          experts_hidden(empty, x, routing, network, keep_hidden)};
}

ExpertsGradients experts_backward_meta(const Tensor& grad_y, const Tensor& x,
                                       const Routing& routing, const FeedForward& network,
                                       at::TensorList hidden, bool needs_x,
                                       const c10::List<bool>& needs_parameters) {
  check_experts_backward(grad_y, x, routing, network, hidden, needs_parameters);
  return {experts_gradient_of_x(empty, x, needs_x),
          experts_gradient_of_gates(empty, x, routing.gates),
          experts_gradients_of(empty, network, needs_parameters)};
}

LinearCrossEntropyOutputs linear_cross_entropy_meta(const Classifier& classifier,
                                                    const LossOptions& options,
                                                    const c10::List<bool>& keep_gradients) {
  check_linear_cross_entropy("linear_cross_entropy", classifier, options, "keep_gradients",
                             keep_gradients);
  return linear_cross_entropy_outputs(empty, classifier, options, keep_gradients);
}

std::vector<Tensor> linear_cross_entropy_backward_meta(const Tensor& grad_loss,
                                                       const Classifier& classifier,
                                                       const LossOptions& options,
                                                       const Tensor& lse, at::TensorList gradients,
                                                       const c10::List<bool>& needs) {
  check_linear_cross_entropy_backward(grad_loss, classifier, options, lse, gradients, needs);
  return linear_cross_entropy_gradients(empty, classifier, needs);
}

LstmOutputs lstm_meta(const Lstm& lstm) {
  check_lstm("lstm", lstm);
  return lstm_outputs(empty, lstm);
}

std::vector<Tensor> lstm_backward_meta(const LstmOutputGradients& gradients, const Lstm& lstm,
                                       const LstmSaved& saved, const c10::List<bool>& needs) {
  check_lstm_backward(gradients, lstm, saved, needs);
  return lstm_gradients(empty, lstm, needs);
}

std::tuple<Tensor, Tensor> lstm_cell_meta(const Tensor& gates, const Tensor& c_0) {
  check_lstm_cell("lstm_cell", gates, c_0);
  return lstm_cell_outputs(empty, c_0);
}

std::tuple<Tensor, Tensor> lstm_cell_backward_meta(const OptionalTensor& grad_h,
                                                   const OptionalTensor& grad_c,
                                                   const Tensor& gates, const Tensor& c_0) {
  check_lstm_cell_backward(grad_h, grad_c, gates, c_0);
  return lstm_cell_gradients(empty, gates, c_0);
}

void factored_step_meta(Tensor& param, const Tensor& grad, Tensor& row, Tensor& column,
                        const Tensor& lr, const Tensor& correction, double decay, double gain,
                        double eps, bool) {
  check_factored_step(param, grad, row, column, lr, correction, decay, gain, eps);
}

}  // namespace
}  // namespace moe_ext

TORCH_LIBRARY_IMPL(moe_ext, Meta, m) {
  m.impl("noisy_topk_gating", &moe_ext::noisy_topk_gating_meta);
  m.impl("_noisy_topk_gating_backward", &moe_ext::noisy_topk_gating_backward_meta);
  m.impl("topk_routing", &moe_ext::topk_routing_meta);
  m.impl("_topk_routing_backward", &moe_ext::topk_routing_backward_meta);
  m.impl("load", &moe_ext::load_meta);
  m.impl("_load_backward", &moe_ext::load_backward_meta);
  m.impl("batchwise_topm", &moe_ext::batchwise_topm_meta);
  m.impl("selected_softmax", &moe_ext::selected_softmax_meta);
  m.impl("_selected_softmax_backward", &moe_ext::selected_softmax_backward_meta);
  m.impl("importance", &moe_ext::importance_meta);
  m.impl("importance_and_load", &moe_ext::importance_and_load_meta);
  m.impl("weighted_cv_squared", &moe_ext::weighted_cv_squared_meta);
  m.impl("_weighted_cv_squared_backward", &moe_ext::weighted_cv_squared_backward_meta);
  m.impl("dispatch_plan", &moe_ext::dispatch_plan_meta);
  m.impl("dispatch", &moe_ext::dispatch_meta);
  m.impl("_dispatch_backward", &moe_ext::dispatch_backward_meta);
  m.impl("combine", &moe_ext::combine_meta);
  m.impl("_combine_backward", &moe_ext::combine_backward_meta);
  m.impl("experts", &moe_ext::experts_of<moe_ext::experts_meta>);
  m.impl("_experts_backward", &moe_ext::experts_backward_of<moe_ext::experts_backward_meta>);
  m.impl("linear_cross_entropy",
         &moe_ext::linear_cross_entropy_of<moe_ext::linear_cross_entropy_meta>);
  m.impl("_linear_cross_entropy_backward",
         &moe_ext::linear_cross_entropy_backward_of<moe_ext::linear_cross_entropy_backward_meta>);
  m.impl("lstm", &moe_ext::lstm_of<moe_ext::lstm_meta>);
  m.impl("_lstm_backward", &moe_ext::lstm_backward_of<moe_ext::lstm_backward_meta>);
  m.impl("lstm_cell", &moe_ext::lstm_cell_meta);
  m.impl("_lstm_cell_backward", &moe_ext::lstm_cell_backward_meta);
  m.impl("factored_step_", &moe_ext::factored_step_meta);
}
