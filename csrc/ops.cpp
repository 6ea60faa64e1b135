// The typed functions of moe_ext/ops.h: each calls its operator through the dispatcher.
#include <moe_ext/ops.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <string>
#include <tuple>
#include <vector>

#include "experts_arguments.h"
#include "find_operator.h"
#include "linear_cross_entropy_arguments.h"
#include "lstm_arguments.h"
#include "tensor.h"

namespace moe_ext::ops {

TopKSelection noisy_topk_gating(const Tensor& clean_logits, const OptionalTensor& raw_noise_stddev,
                                const OptionalTensor& noise, int64_t k, double noise_epsilon) {
  static const PublicOperator<std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
      const Tensor&, const OptionalTensor&, const OptionalTensor&, c10::SymInt, double)>
      op("moe_ext::noisy_topk_gating");
  auto [gates, expert_index, threshold, threshold_index, noise_stddev] =
      op.call(clean_logits, raw_noise_stddev, noise, k, noise_epsilon);
  return {gates, expert_index, threshold, threshold_index, noise_stddev};
}

TopKRouting topk_routing(const Tensor& logits, int64_t k, const OptionalTensor& bias,
                         std::string_view score, bool renormalize, double scale, int64_t num_groups,
                         int64_t groups_per_token, int64_t group_score_k,
                         const OptionalTensor& expert_index) {
  static const PublicOperator<std::tuple<Tensor, Tensor>(
      const Tensor&, c10::SymInt, const OptionalTensor&, std::string_view, bool, double,
      c10::SymInt, c10::SymInt, c10::SymInt, const OptionalTensor&)>
      op("moe_ext::topk_routing");
  auto [gates, index] = op.call(logits, k, bias, score, renormalize, scale, num_groups,
                                groups_per_token, group_score_k, expert_index);
  return {gates, index};
}

Tensor load(const Tensor& clean_logits, const Tensor& noise_stddev, const Tensor& threshold,
            const Tensor& expert_index, const OptionalTensor& group_offsets) {
  static const PublicOperator<decltype(load)> op("moe_ext::load");
  return op.call(clean_logits, noise_stddev, threshold, expert_index, group_offsets);
}

Tensor importance(const Tensor& gates, const Tensor& expert_index, int64_t num_experts) {
  static const PublicOperator<Tensor(const Tensor&, const Tensor&, c10::SymInt)> op(
      "moe_ext::importance");
  return op.call(gates, expert_index, num_experts);
}

ImportanceAndLoad importance_and_load(const Tensor& gates, const Tensor& expert_index,
                                      int64_t num_experts) {
  static const PublicOperator<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, c10::SymInt)>
      op("moe_ext::importance_and_load");
  auto [importance, load] = op.call(gates, expert_index, num_experts);
  return {importance, load};
}

Tensor cv_squared(const Tensor& values) { return weighted_cv_squared(values, 1.0); }

Tensor weighted_cv_squared(at::TensorList values, at::ArrayRef<double> weights) {
  static const PublicOperator<decltype(weighted_cv_squared)> op("moe_ext::weighted_cv_squared");
  return op.call(values, weights);
}

BatchwiseTopM batchwise_topm(const Tensor& scores, int64_t m, int64_t first_expert,
                             std::optional<int64_t> num_experts) {
  static const PublicOperator<std::tuple<Tensor, Tensor>(const Tensor&, c10::SymInt, c10::SymInt,
                                                         std::optional<c10::SymInt>)>
      op("moe_ext::batchwise_topm");
  auto [row_index, mth_score] = op.call(scores, m, first_expert, num_experts);
  return {row_index, mth_score};
}

Tensor selected_softmax(const Tensor& logits, const Tensor& expert_index,
                        const Tensor& token_offsets) {
  static const PublicOperator<decltype(selected_softmax)> op("moe_ext::selected_softmax");
  return op.call(logits, expert_index, token_offsets);
}

DispatchPlan dispatch_plan(const Tensor& expert_index, int64_t num_experts) {
  static const PublicOperator<std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&,
                                                                         c10::SymInt)>
      op("moe_ext::dispatch_plan");
  auto [permutation, inverse, tokens_per_expert, offsets] = op.call(expert_index, num_experts);
  return {permutation, inverse, tokens_per_expert, offsets};
}

Tensor dispatch(const Tensor& x, const Tensor& inverse, const OptionalTensor& token_offsets) {
  static const PublicOperator<decltype(dispatch)> op("moe_ext::dispatch");
  return op.call(x, inverse, token_offsets);
}

Tensor combine(const Tensor& expert_output, const Tensor& gates, const Tensor& inverse,
               const OptionalTensor& token_offsets) {
  static const PublicOperator<decltype(combine)> op("moe_ext::combine");
  return op.call(expert_output, gates, inverse, token_offsets);
}

namespace {

Tensor run_experts(const Tensor& x, const ExpertsOptions& options, FeedForward network,
                   at::ArrayRef<LoRA> lora) {
  std::vector<Tensor> a, b, masks;
  std::vector<double> scales;
  for (const LoRA& adapter : lora) {
    const bool absent = !adapter.a.defined() && !adapter.b.defined();
    a.push_back(absent ? at::empty({0}, x.options()) : adapter.a);
    b.push_back(absent ? at::empty({0}, x.options()) : adapter.b);
    scales.push_back(adapter.scale);
    const auto options = x.options().dtype(at::kBool);
    masks.push_back(adapter.mask.defined() ? adapter.mask : at::empty({0}, options));
  }
  network.lora = {.a = a, .b = b, .scales = scales, .masks = masks};
  const bool differentiated = torch::autograd::compute_requires_grad(
      x, options.gates, network.weights, network.biases, network.lora.a, network.lora.b);
  const Routing routing{.offsets = options.offsets,
                        .inverse = options.inverse,
                        .token_offsets = options.token_offsets,
                        .gates = options.gates};
  return std::get<0>(call_experts(x, routing, network, differentiated && !options.recompute));
}

}  // namespace

Tensor experts(const Tensor& x, at::TensorList weights, at::TensorList biases,
               std::string_view activation, const ExpertsOptions& options,
               at::ArrayRef<double> activation_args, at::ArrayRef<LoRA> lora) {
  return run_experts(x, options,
                     {.weights = weights,
                      .biases = biases,
                      .activation = activation,
                      .activation_args = activation_args},
                     lora);
}

Tensor packed_experts(const Tensor& x, at::ArrayRef<PackedWeight> weights, at::TensorList biases,
                      std::string_view activation, const ExpertsOptions& options,
                      at::ArrayRef<double> activation_args, std::string_view arithmetic,
                      at::ArrayRef<LoRA> lora) {
  std::vector<Tensor> panels;
  c10::List<std::string> formats;
  std::vector<int64_t> groups, columns;
  for (const PackedWeight& weight : weights) {
    panels.push_back(weight.panels);
    formats.push_back(std::string(weight.format));
    groups.push_back(weight.group);
    columns.push_back(weight.outputs);
  }
  const PackedLayers packed{
      .formats = formats, .groups = groups, .columns = columns, .arithmetic = arithmetic};
  return run_experts(x, options,
                     {.weights = panels,
                      .biases = biases,
                      .activation = activation,
                      .activation_args = activation_args,
                      .packed = packed},
                     lora);
}

Tensor linear_cross_entropy(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                            const LinearCrossEntropyOptions& options) {
  const bool keeps =
      at::GradMode::is_enabled() && options.reduction != "none" && !options.recompute;
  const auto& bias = options.linear_bias;
  return std::get<0>(call_linear_cross_entropy(
      {.input = input, .weight = linear_weight, .target = target, .bias = bias},
      {.reduction = options.reduction,
       .ignore_index = options.ignore_index,
       .label_smoothing = options.label_smoothing,
       .z_loss = options.z_loss,
       .softcap = options.softcap},
      c10::List<bool>({keeps && input.requires_grad(), keeps && linear_weight.requires_grad(),
                       keeps && bias && bias->requires_grad()})));
}

LstmOutputs lstm(const Tensor& x, const Tensor& weight_input, const Tensor& weight_recurrent,
                 const OptionalTensor& bias, const OptionalTensor& projection,
                 const OptionalTensor& m_0, const OptionalTensor& c_0,
                 const OptionalTensor& lengths, bool reverse) {
  auto [m, m_n, c_n, gates, cells] = lstm_of<call_lstm>(x, weight_input, weight_recurrent, bias,
                                                        projection, m_0, c_0, lengths, reverse);
  return {m, m_n, c_n};
}

LstmCell lstm_cell(const Tensor& gates, const Tensor& c_0) {
  static const PublicOperator<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&)> op(
      "moe_ext::lstm_cell");
  auto [h, c] = op.call(gates, c_0);
  return {h, c};
}

void factored_step_(Tensor& param, const Tensor& grad, Tensor& row, Tensor& column,
                    const Tensor& lr, const Tensor& correction, double decay, double gain,
                    double eps, bool mean_of_roots) {
  static const PublicOperator<decltype(factored_step_)> op("moe_ext::factored_step_");
  op.call(param, grad, row, column, lr, correction, decay, gain, eps, mean_of_roots);
}

}  // namespace moe_ext::ops
