// The shapes of every operator's outputs, for torch.compile, export and the meta device.
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "checks.h"

namespace moe_ext {
namespace {

Tensor like(const Tensor& tensor) { return tensor.new_empty_symint(tensor.sym_sizes()); }

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> noisy_topk_gating_meta(
    const Tensor& clean_logits, const OptionalTensor& raw_noise_stddev, const OptionalTensor& noise,
    c10::SymInt k, double noise_epsilon) {
  check_noisy_topk_gating("noisy_topk_gating", clean_logits, raw_noise_stddev, noise, k,
                          noise_epsilon);
  const auto T = clean_logits.sym_size(0);
  const auto E = clean_logits.sym_size(1);
  const auto real = clean_logits.options().dtype(accumulate_type(clean_logits));
  const auto index = clean_logits.options().dtype(at::kLong);
  return {clean_logits.new_empty_symint({T, k}, real), clean_logits.new_empty_symint({T, k}, index),
          clean_logits.new_empty_symint({T, 2}, real), clean_logits.new_empty_symint({T, 2}, index),
          clean_logits.new_empty_symint({noise ? T : c10::SymInt(0), E}, real)};
}

std::tuple<Tensor, Tensor> noisy_topk_gating_backward_meta(
    const OptionalTensor& grad_gates, const OptionalTensor& grad_threshold,
    const OptionalTensor& grad_noise_stddev, const Tensor& gates, const Tensor& expert_index,
    const Tensor& threshold_index, const Tensor& clean_logits,
    const OptionalTensor& raw_noise_stddev, const OptionalTensor& noise) {
  check_noisy_topk_gating_backward(grad_gates, grad_threshold, grad_noise_stddev, gates,
                                   expert_index, threshold_index, clean_logits, raw_noise_stddev,
                                   noise);
  const auto T = noise ? clean_logits.sym_size(0) : c10::SymInt(0);
  return {like(clean_logits), clean_logits.new_empty_symint({T, clean_logits.sym_size(1)})};
}

Tensor load_meta(const Tensor& clean_logits, const Tensor& noise_stddev, const Tensor& threshold,
                 const Tensor& expert_index, const OptionalTensor& group_offsets) {
  check_load("load", clean_logits, noise_stddev, threshold, expert_index, group_offsets);
  return noise_stddev.new_empty_symint(load_shape(clean_logits, group_offsets));
}

std::tuple<Tensor, Tensor, Tensor> load_backward_meta(
    const Tensor& grad_load, const Tensor& clean_logits, const Tensor& noise_stddev,
    const Tensor& threshold, const Tensor& expert_index, const OptionalTensor& group_offsets) {
  check_load_backward(grad_load, clean_logits, noise_stddev, threshold, expert_index,
                      group_offsets);
  return {like(clean_logits), like(noise_stddev), like(threshold)};
}

std::tuple<Tensor, Tensor> batchwise_topm_meta(const Tensor& scores, c10::SymInt m,
                                               c10::SymInt first_expert,
                                               std::optional<c10::SymInt> num_experts) {
  check_batchwise_topm(scores, first_expert, num_experts);
  const auto G = scores.sym_size(0);
  const auto E = scores.sym_size(2);
  return {scores.new_empty_symint({G, E, m}, scores.options().dtype(at::kLong)),
          scores.new_empty_symint({G, E})};
}

Tensor selected_softmax_meta(const Tensor& logits, const Tensor& expert_index,
                             const Tensor& token_offsets) {
  check_selected_softmax(logits, expert_index, token_offsets);
  return logits.new_empty_symint(expert_index.sym_sizes(),
                                 logits.options().dtype(accumulate_type(logits)));
}

Tensor selected_softmax_backward_meta(const Tensor& grad_gates, const Tensor& gates,
                                      const Tensor& expert_index, const Tensor& token_offsets,
                                      c10::SymInt num_experts) {
  check_selected_softmax_backward(grad_gates, gates, expert_index, token_offsets, num_experts);
  return gates.new_empty_symint({token_offsets.sym_size(0) - 1, num_experts});
}

Tensor importance_meta(const Tensor& gates, const Tensor& expert_index, c10::SymInt num_experts) {
  check_importance(gates, expert_index, num_experts);
  return gates.new_empty_symint({num_experts}, gates.options().dtype(accumulate_type(gates)));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dispatch_plan_meta(const Tensor& expert_index,
                                                              c10::SymInt num_experts) {
  check_dispatch_plan(expert_index, num_experts);
  return {expert_index.new_empty_symint({expert_index.sym_numel()}), like(expert_index),
          expert_index.new_empty_symint({num_experts}),
          expert_index.new_empty_symint({num_experts + 1})};
}

Tensor dispatch_meta(const Tensor& x, const Tensor& inverse, const OptionalTensor& token_offsets) {
  check_dispatch(x, inverse, token_offsets);
  return x.new_empty_symint({inverse.sym_numel(), x.sym_size(1)});
}

Tensor dispatch_backward_meta(const Tensor& grad_rows, const Tensor& inverse,
                              const OptionalTensor& token_offsets) {
  const auto T = check_dispatch_backward(grad_rows, inverse, token_offsets);
  return grad_rows.new_empty_symint({T, grad_rows.sym_size(1)});
}

Tensor combine_meta(const Tensor& expert_output, const Tensor& gates, const Tensor& inverse,
                    const OptionalTensor& token_offsets) {
  const auto T = check_combine("combine", expert_output, gates, inverse, token_offsets);
  return expert_output.new_empty_symint({T, expert_output.sym_size(1)});
}

std::tuple<Tensor, Tensor> combine_backward_meta(const Tensor& grad_y, const Tensor& expert_output,
                                                 const Tensor& gates, const Tensor& inverse,
                                                 const OptionalTensor& token_offsets) {
  check_combine_backward(grad_y, expert_output, gates, inverse, token_offsets);
  return {like(expert_output), like(gates)};
}

std::tuple<Tensor, std::vector<Tensor>> experts_meta(
    const Tensor& x, const OptionalTensor& offsets, const OptionalTensor& inverse,
    const OptionalTensor& token_offsets, const OptionalTensor& gates, at::TensorList weights,
    std::optional<at::TensorList> some_biases, c10::string_view activation, bool keep_hidden) {
  const auto biases = some_biases.value_or(at::TensorList());
  check_experts("experts", x, offsets, inverse, token_offsets, gates, weights, biases, activation);
  const auto R = inverse ? inverse->sym_numel() : x.sym_size(0);
  std::vector<Tensor> hidden;
  for (size_t l = 0; keep_hidden && l + 1 < weights.size(); ++l) {
    hidden.push_back(x.new_empty_symint({R, weights[l].sym_size(2)}));
  }
  return {x.new_empty_symint({experts_num_outputs(x, inverse, gates), weights.back().sym_size(2)}),
          hidden};
}

std::tuple<Tensor, Tensor, std::vector<Tensor>, std::vector<Tensor>> experts_backward_meta(
    const Tensor& grad_y, const Tensor& x, const OptionalTensor& offsets,
    const OptionalTensor& inverse, const OptionalTensor& token_offsets, const OptionalTensor& gates,
    at::TensorList weights, std::optional<at::TensorList> some_biases, at::TensorList hidden,
    c10::string_view activation, bool needs_x, bool needs_parameters) {
  const auto biases = some_biases.value_or(at::TensorList());
  check_experts_backward(grad_y, x, offsets, inverse, token_offsets, gates, weights, biases, hidden,
                         activation);
  const auto like_each = [&](at::TensorList tensors) {
    std::vector<Tensor> each;
    if (!needs_parameters) return each;
    for (const Tensor& tensor : tensors) each.push_back(like(tensor));
    return each;
  };
  return {needs_x ? like(x) : x.new_empty({0}),
          gates ? like(*gates) : x.new_empty({0}, x.options().dtype(accumulate_type(x))),
          like_each(weights), like_each(biases)};
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
  m.impl("load", &moe_ext::load_meta);
  m.impl("_load_backward", &moe_ext::load_backward_meta);
  m.impl("batchwise_topm", &moe_ext::batchwise_topm_meta);
  m.impl("selected_softmax", &moe_ext::selected_softmax_meta);
  m.impl("_selected_softmax_backward", &moe_ext::selected_softmax_backward_meta);
  m.impl("importance", &moe_ext::importance_meta);
  m.impl("dispatch_plan", &moe_ext::dispatch_plan_meta);
  m.impl("dispatch", &moe_ext::dispatch_meta);
  m.impl("_dispatch_backward", &moe_ext::dispatch_backward_meta);
  m.impl("combine", &moe_ext::combine_meta);
  m.impl("_combine_backward", &moe_ext::combine_backward_meta);
  m.impl("experts", &moe_ext::experts_meta);
  m.impl("_experts_backward", &moe_ext::experts_backward_meta);
  m.impl("factored_step_", &moe_ext::factored_step_meta);
}
