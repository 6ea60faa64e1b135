// Noisy top-k gating (Section 2.1) with the smooth load of Appendix A, on one level and on two
// levels (Appendix B).
#include <moe_ext/nn.h>
#include <torch/nn/init.h>

#include <limits>
#include <ostream>
#include <vector>

#include "checks.h"
#include "logits.h"

namespace moe_ext::nn {
namespace {

Tensor standard_normal(const Tensor& like, const std::optional<at::Generator>& generator) {
  return generator ? at::empty_like(like).normal_(0, 1, generator) : at::randn_like(like);
}

// The arguments of ops::noisy_topk_gating.
struct NoisyLogits {
  Tensor clean_logits;
  OptionalTensor raw_noise_stddev, noise;
};

// The clean logits x * w_gate, and the selection of the k largest noisy logits.
struct Selection {
  Tensor clean_logits;
  ops::TopKSelection kept;
};

// Computes the logits of one level of a flat or hierarchical gate. In training mode, x * w_noise
// gives the standard deviation of the noise. A dispatch plan assigns tokens to groups. The results
// then have one row for each (token, group) assignment, and w_gate and w_noise have one matrix for
// each group.
template <typename NoisyGate>
NoisyLogits noisy_logits(NoisyGate& gate, const Tensor& x, const Tensor& w_gate,
                         const Tensor& w_noise,
                         const std::optional<ops::DispatchPlan>& plan = std::nullopt) {
  ops::ExpertsOptions routing;
  if (plan) routing = {.offsets = plan->offsets, .inverse = plan->inverse};
  std::vector<Tensor> weights{w_gate};
  if (gate.is_training()) weights.push_back(w_noise);
  const auto products = logits_of_all(x, weights, routing);
  const Tensor& clean_logits = products[0];
  OptionalTensor raw_noise_stddev, noise;
  if (gate.is_training()) {
    raw_noise_stddev = products[1];
    noise = gate.draw_noise(clean_logits);
    // Noise is drawn in slot order: it does not depend on other tokens' groups.
    if (plan) noise = ops::dispatch(*noise, plan->inverse.reshape({-1, 1}));
  }
  return {clean_logits, raw_noise_stddev, noise};
}

template <typename NoisyGate>
Selection select(const NoisyGate& gate, const NoisyLogits& noisy, int64_t k) {
  const auto& [clean_logits, raw_noise_stddev, noise] = noisy;
  return {clean_logits, ops::noisy_topk_gating(clean_logits, raw_noise_stddev, noise, k,
                                               gate.options.noise_epsilon())};
}

// Sets the clean logits [T, E] of experts that are not in expert_index [T, k] to -inf. A selection
// then selects exactly the given experts, with unchanged gates.
NoisyLogits only_given(NoisyLogits noisy, const Tensor& expert_index, int64_t k) {
  auto& clean = noisy.clean_logits;
  require_defined("NoisyTopKGate", "expert_index", expert_index);
  const auto checked = ops::topk_routing(clean.detach(), k, {}, "softmax", /*renormalize=*/true,
                                         /*scale=*/1, /*num_groups=*/1, /*groups_per_token=*/1,
                                         /*group_score_k=*/2, expert_index);
  const auto given = at::zeros_like(clean, at::kBool).scatter(1, checked.expert_index, true);
  clean = at::where(given, clean, -std::numeric_limits<double>::infinity());
  return noisy;
}

// Computes Load(X) of a selection in training mode.
template <typename NoisyGate>
Tensor load_of(const NoisyGate& gate, const Selection& selection,
               const OptionalTensor& group_offsets = std::nullopt) {
  const auto& kept = selection.kept;
  const auto threshold = gate.options.detach_threshold() ? kept.threshold.detach() : kept.threshold;
  return ops::load(selection.clean_logits, kept.noise_stddev, threshold, kept.expert_index,
                   group_offsets);
}

template <typename Options>
void print_noise(std::ostream& stream, const Options& options) {
  stream << std::boolalpha << ", noise_epsilon=" << options.noise_epsilon()
         << ", detach_threshold=" << options.detach_threshold() << ")";
}

}  // namespace

NoisyTopKGateOptions::NoisyTopKGateOptions(int64_t d_model, int64_t num_experts, int64_t k)
    : d_model_(d_model), num_experts_(num_experts), k_(k) {}

NoisyTopKGateImpl::NoisyTopKGateImpl(const NoisyTopKGateOptions& options)
    : Gate(options.d_model(), options.num_experts(), options.k(), "NoisyTopKGate"),
      options(options) {
  require_at_least("NoisyTopKGate", "noise_epsilon", options.noise_epsilon(), 0);
  reset();
}

void NoisyTopKGateImpl::reset() {
  w_gate = register_parameter("w_gate", torch::empty({d_model(), num_experts()}));
  w_noise = register_parameter("w_noise", torch::empty({d_model(), num_experts()}));
  reset_parameters();
}

void NoisyTopKGateImpl::reset_parameters() {
  for (const auto& parameter : parameters()) torch::nn::init::zeros_(parameter);
}

void NoisyTopKGateImpl::pretty_print(std::ostream& stream) const {
  stream << "moe_ext::nn::NoisyTopKGate(d_model=" << d_model() << ", num_experts=" << num_experts()
         << ", k=" << k();
  print_noise(stream, options);
}

Tensor NoisyTopKGateImpl::draw_noise(const Tensor& like) {
  return standard_normal(like, options.generator());
}

Routing NoisyTopKGateImpl::forward(const Tensor& x) { return route(x, std::nullopt); }

Routing NoisyTopKGateImpl::replay(const Tensor& x, const Tensor& expert_index) {
  return route(x, expert_index);
}

Routing NoisyTopKGateImpl::route(const Tensor& x, const OptionalTensor& expert_index) {
  require_tokens("NoisyTopKGate", x, d_model());
  const auto noisy = noisy_logits(*this, x, w_gate, w_noise);
  const auto kept =
      select(*this, expert_index ? only_given(noisy, *expert_index, k()) : noisy, k()).kept;
  OptionalTensor load;
  if (is_training()) {
    load = load_of(*this,
                   expert_index ? select(*this, noisy, k()) : Selection{noisy.clean_logits, kept});
  }
  return make_routing(kept.gates, kept.expert_index, load, noisy.clean_logits);
}

HierarchicalNoisyTopKGateOptions::HierarchicalNoisyTopKGateOptions(int64_t d_model,
                                                                   int64_t num_groups,
                                                                   int64_t experts_per_group,
                                                                   std::array<int64_t, 2> k)
    : d_model_(d_model), num_groups_(num_groups), experts_per_group_(experts_per_group), k_(k) {}

HierarchicalNoisyTopKGateImpl::HierarchicalNoisyTopKGateImpl(
    const HierarchicalNoisyTopKGateOptions& options)
    : Gate(options.d_model(),
           num_experts_of_levels("HierarchicalNoisyTopKGate", options.d_model(),
                                 options.num_groups(), options.experts_per_group(), options.k()),
           k_of_levels("HierarchicalNoisyTopKGate", options.k()), "HierarchicalNoisyTopKGate"),
      options(options) {
  require_at_least("HierarchicalNoisyTopKGate", "noise_epsilon", options.noise_epsilon(), 0);
  reset();
}

void HierarchicalNoisyTopKGateImpl::reset() {
  const auto a = options.num_groups(), b = options.experts_per_group();
  w_gate = register_parameter("w_gate", torch::empty({d_model(), a}));
  w_noise = register_parameter("w_noise", torch::empty({d_model(), a}));
  w_gate_secondary = register_parameter("w_gate_secondary", torch::empty({a, d_model(), b}));
  w_noise_secondary = register_parameter("w_noise_secondary", torch::empty({a, d_model(), b}));
  reset_parameters();
}

void HierarchicalNoisyTopKGateImpl::reset_parameters() {
  for (const auto& parameter : parameters()) torch::nn::init::zeros_(parameter);
}

void HierarchicalNoisyTopKGateImpl::pretty_print(std::ostream& stream) const {
  stream << "moe_ext::nn::HierarchicalNoisyTopKGate(d_model=" << d_model()
         << ", num_groups=" << options.num_groups()
         << ", experts_per_group=" << options.experts_per_group()
         << ", k=" << tuple_of(options.k());
  print_noise(stream, options);
}

Tensor HierarchicalNoisyTopKGateImpl::draw_noise(const Tensor& like) {
  return like.size(1) == 1 ? at::zeros_like(like) : standard_normal(like, options.generator());
}

Routing HierarchicalNoisyTopKGateImpl::forward(const Tensor& x) {
  require_tokens("HierarchicalNoisyTopKGate", x, d_model());
  const auto wide = widened(x);
  const auto primary = select(*this, noisy_logits(*this, wide, w_gate, w_noise), options.k()[0]);
  // The rows of X^(1), X^(2), ...: one for each slot (token, chosen group).
  const auto plan = ops::dispatch_plan(primary.kept.expert_index, options.num_groups());
  const auto secondary = select(
      *this, noisy_logits(*this, wide, w_gate_secondary, w_noise_secondary, plan), options.k()[1]);

  // combine multiplies the secondary gates of each row by its primary gate.
  const auto gates = ops::combine(secondary.kept.gates, primary.kept.gates.reshape({-1, 1}),
                                  plan.inverse.reshape({-1, 1}))
                         .view({-1, k()});
  const auto expert = secondary.kept.expert_index.index_select(0, plan.inverse.reshape(-1));
  const auto group = primary.kept.expert_index.reshape({-1, 1});
  const auto expert_index = (expert + group * options.experts_per_group()).view({-1, k()});

  if (!is_training()) return make_routing(gates, expert_index);
  const auto load = load_of(*this, primary);
  if (options.experts_per_group() == 1) return make_routing(gates, expert_index, load);

  // App. B: Load_H(X)_ij = Load_primary(X)_i * Load_i(X^(i))_j / |X^(i)|; 0 for an empty group.
  const auto load_of_group = load_of(*this, secondary, plan.offsets);
  const auto group_size = plan.tokens_per_expert.to(load.scalar_type());
  const auto load_of_pair = (load / group_size.clamp_min(1)).unsqueeze(1).mul(load_of_group);
  auto routing = make_routing(gates, expert_index, load_of_pair.reshape(-1));
  routing.load_factors = {load, load_of_group, group_size};
  return routing;
}

}  // namespace moe_ext::nn
