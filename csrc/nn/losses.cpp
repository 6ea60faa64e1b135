// The balancing losses (Section 4, Appendix A), the threshold loss (Appendix F), and the losses of
// later routers.
#include <moe_ext/nn.h>

#include "checks.h"

namespace moe_ext::nn {
namespace {

// Computes E sum_i f_i P_i from sums over tokens, [..., E], and numbers of tokens [...].
Tensor switch_loss(const Tensor& counts, const Tensor& probabilities, const Tensor& num_tokens) {
  const auto f = counts / counts.sum(-1, /*keepdim=*/true).clamp_min(1);
  const auto p = probabilities / num_tokens.unsqueeze(-1).clamp_min(1);
  return (f * p).sum(-1) * counts.size(-1);
}

// Returns a matrix like `like` [T, E]: 1 for the chosen experts of each token, else 0.
Tensor chosen(const Routing& routing, const Tensor& like) {
  const auto zeros = at::zeros_like(like);
  if (!routing.token_offsets) return zeros.scatter(1, routing.expert_index, 1);
  const std::optional<int64_t> num_slots = routing.expert_index.size(0);
  const auto token = at::repeat_interleave(routing.token_offsets->diff(), num_slots);
  return zeros.index_put({token, routing.expert_index}, at::ones({}, zeros.options()));
}

// Sums values [T, E] over the tokens of each sequence, [S, E], in a fixed order.
Tensor sum_of_sequences(const Tensor& values, const Tensor& sequence_offsets) {
  const auto rows = at::arange(values.size(0), sequence_offsets.options());
  return ops::combine(values, at::ones({values.size(0)}, values.options()), rows, sequence_offsets);
}

}  // namespace

Tensor importance_loss(const Tensor& importance, double weight) {
  require_at_least("importance_loss", "weight", weight, 0.0);
  return ops::weighted_cv_squared(importance, weight);
}

Tensor load_loss(const Tensor& load, double weight) {
  require_at_least("load_loss", "weight", weight, 0.0);
  return ops::weighted_cv_squared(load, weight);
}

Tensor batchwise_loss(const Tensor& scores, const Tensor& threshold, const Tensor& mask) {
  auto shape = scores.sizes().vec();
  if (shape.size() >= 2) shape.erase(shape.end() - 2);
  require_shape("batchwise_loss", "threshold", threshold, shape);
  require_shape("batchwise_loss", "mask", mask, scores.sizes());
  const auto excess = scores - threshold.unsqueeze(-2);
  const auto type = excess.scalar_type();
  return (((excess > 0).to(type) - mask.to(type)) * excess).sum();
}

RouterLoss::RouterLoss(double weight, const char* owner) : weight(weight) {
  require_at_least(owner, "weight", weight, 0.0);
}

SwitchLoss::SwitchLoss(double weight, bool per_sequence)
    : RouterLoss(weight, "SwitchLoss"), per_sequence(per_sequence) {}

std::string SwitchLoss::name() const {
  return per_sequence ? "switch_loss_per_sequence" : "switch_loss";
}

std::vector<Tensor> SwitchLoss::sums(const Routing& routing, const Tensor& tokens_per_expert,
                                     const Tensor& sequence_offsets) const {
  const auto p = routing.probabilities();
  const auto type = p.scalar_type();
  if (!per_sequence) {
    return {tokens_per_expert.to(type), p.sum(0), at::full({}, p.size(0), p.options())};
  }
  const auto num_tokens = sequence_offsets.diff();
  const auto counts = sum_of_sequences(chosen(routing, p), sequence_offsets);
  const auto losses = switch_loss(counts, sum_of_sequences(p, sequence_offsets), num_tokens);
  return {losses.sum(), num_tokens.count_nonzero().to(type)};
}

Tensor SwitchLoss::value(at::TensorList sums) const {
  if (!per_sequence) return switch_loss(sums[0], sums[1], sums[2]);
  return sums[0] / sums[1].clamp_min(1);
}

ZLoss::ZLoss(double weight) : RouterLoss(weight, "ZLoss") {}

std::string ZLoss::name() const { return "z_loss"; }

std::vector<Tensor> ZLoss::sums(const Routing& routing, const Tensor&, const Tensor&) const {
  TORCH_CHECK_VALUE(routing.logits, "ZLoss: logits must be set by the gate, got None");
  const auto& logits = *routing.logits;
  const auto highest = logits.detach().amax(-1, /*keepdim=*/true);
  const auto log_sum = (logits - highest).exp().sum(-1).log() + highest.squeeze(-1);
  const auto squares = log_sum.square();
  return {squares.sum(), at::full({}, squares.size(0), squares.options())};
}

Tensor ZLoss::value(at::TensorList sums) const { return sums[0] / sums[1].clamp_min(1); }

}  // namespace moe_ext::nn
