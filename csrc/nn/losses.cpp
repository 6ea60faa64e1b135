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

// Computes weight CV(values)^2 of importance or load.
Tensor balance_loss(const char* owner, const char* name, const Tensor& values, double weight) {
  require_defined(owner, name, values);
  require_at_least(owner, "weight", weight, 0);
  TORCH_CHECK_VALUE(values.dim() == 1 && values.numel() > 0, owner, ": ", name,
                    " must have shape [E] with E of at least 1, got ", tuple_of(values.sizes()));
  require_floating(owner, values, name);
  return ops::weighted_cv_squared(values, weight);
}

}  // namespace

Tensor importance_loss(const Tensor& importance, double weight) {
  return balance_loss("importance_loss", "importance", importance, weight);
}

Tensor load_loss(const Tensor& load, double weight) {
  return balance_loss("load_loss", "load", load, weight);
}

Tensor batchwise_loss(const Tensor& scores, const Tensor& threshold, const Tensor& mask) {
  constexpr auto owner = "batchwise_loss";
  require_defined(owner, "scores", scores);
  require_defined(owner, "threshold", threshold);
  auto shape = scores.sizes().vec();
  TORCH_CHECK_VALUE(shape.size() >= 2, owner, ": scores must have shape [..., num_tokens, E], got ",
                    tuple_of(shape));
  shape.erase(shape.end() - 2);
  require_shape(owner, "threshold", threshold, shape);
  require_mask(owner, mask, scores.sizes());
  const auto excess = scores - threshold.unsqueeze(-2);
  const auto type = excess.scalar_type();
  return (((excess > 0).to(type) - mask.to(type)) * excess).sum();
}

RouterLoss::RouterLoss(double weight, const char* owner) : weight(weight), owner_(owner) {
  checked_weight();
}

double RouterLoss::checked_weight() const {
  require_at_least(owner_.c_str(), "weight", weight, 0);
  return weight;
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
