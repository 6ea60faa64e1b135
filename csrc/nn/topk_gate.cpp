// The top k by any score, with groups of experts and a selection bias: the options of later models.
#include <moe_ext/nn.h>
#include <torch/nn/init.h>

#include <cmath>
#include <ostream>

#include "../find_operator.h"
#include "checks.h"
#include "logits.h"

namespace moe_ext::nn {
namespace {

ops::TopKRouting select(const TopKGateOptions& options, const Tensor& logits,
                        const OptionalTensor& bias = std::nullopt,
                        const OptionalTensor& expert_index = std::nullopt) {
  return ops::topk_routing(logits, options.k(), bias, options.score(), options.renormalize(),
                           options.scale(), options.num_groups(), options.groups_per_token(),
                           options.group_score_k(), expert_index);
}

void check_rate(const TopKGateOptions& options) {
  const auto& rate = options.bias_update_rate();
  if (rate) require_at_least("TopKGate", "bias_update_rate", *rate, 0);
}

// Returns scores that are not a softmax, for Routing::scores.
OptionalTensor given_scores(const Tensor& logits, const std::string& score) {
  if (score == "sigmoid") return logits.sigmoid();
  if (score == "sqrt_softplus") {
    // Where softplus underflows, the gradient is 0.
    const double tiny = logits.scalar_type() == at::kDouble ? std::numeric_limits<double>::min()
                                                            : std::numeric_limits<float>::min();
    return at::softplus(logits).clamp_min(tiny).sqrt();
  }
  return std::nullopt;
}

void count_tokens(Tensor& counts, const Tensor& load) {
  static const auto op = find_operator<void(Tensor&, const Tensor&)>("moe_ext::_count_tokens_");
  op.call(counts, load);
}

}  // namespace

TopKGateOptions::TopKGateOptions(int64_t d_model, int64_t num_experts, int64_t k)
    : d_model_(d_model), num_experts_(num_experts), k_(k) {}

TopKGateImpl::TopKGateImpl(int64_t d_model, int64_t num_experts, int64_t k)
    : TopKGateImpl(TopKGateOptions(d_model, num_experts, k)) {}

TopKGateImpl::TopKGateImpl(const TopKGateOptions& options)
    : Gate(options.d_model(), options.num_experts(), options.k(), "TopKGate"), options(options) {
  check_rate(options);
  require_positive("TopKGate", "scale", options.scale());
  require_size("TopKGate", "num_groups", options.num_groups());
  require_size("TopKGate", "groups_per_token", options.groups_per_token());
  require_size("TopKGate", "group_score_k", options.group_score_k());
  select(options, torch::empty({0, num_experts()}, torch::kMeta));  // checks the other options
  reset();
}

void TopKGateImpl::reset() {
  w_gate = register_parameter("w_gate", torch::empty({d_model(), num_experts()}));
  if (options.logit_bias()) b_gate = register_parameter("b_gate", torch::empty(num_experts()));
  if (options.bias_update_rate()) {
    selection_bias = register_buffer("selection_bias", widened(torch::empty(num_experts())));
    tokens_since_update = torch::empty(num_experts(), torch::kLong);
  }
  reset_parameters();
}

void TopKGateImpl::reset_parameters() {
  const torch::NoGradGuard no_grad;
  // With W_g = 0, every token would be routed to the same experts.
  torch::nn::init::normal_(w_gate, 0, 0.1 * std::pow(d_model(), -0.5));
  for (auto* value : {&b_gate, &selection_bias, &tokens_since_update}) {
    if (value->defined()) value->zero_();
  }
}

void TopKGateImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "moe_ext::nn::TopKGate(d_model=" << d_model()
         << ", num_experts=" << num_experts() << ", k=" << k();
  const TopKGateOptions defaults(d_model(), num_experts(), k());
  const auto print = [&](const char* name, const auto& value, const auto& otherwise) {
    if (value != otherwise) stream << ", " << name << "=" << value;
  };
  print("score", options.score(), defaults.score());
  print("renormalize", options.renormalize(), defaults.renormalize());
  print("scale", options.scale(), defaults.scale());
  print("num_groups", options.num_groups(), defaults.num_groups());
  print("groups_per_token", options.groups_per_token(), defaults.groups_per_token());
  print("group_score_k", options.group_score_k(), defaults.group_score_k());
  print("logit_bias", options.logit_bias(), defaults.logit_bias());
  if (const auto& rate = options.bias_update_rate()) stream << ", bias_update_rate=" << *rate;
  stream << ")";
}

std::shared_ptr<torch::nn::Module> TopKGateImpl::clone(
    const std::optional<torch::Device>& device) const {
  const auto copy = Cloneable::clone(device);
  if (tokens_since_update.defined()) {
    auto& counts = dynamic_cast<TopKGateImpl&>(*copy).tokens_since_update;
    counts = tokens_since_update.clone().to(device.value_or(tokens_since_update.device()));
  }
  return copy;
}

template <typename... Target>
void TopKGateImpl::move(Target... target) {
  const auto bias = selection_bias.defined() ? selection_bias.detach() : Tensor();
  Module::to(target...);
  if (!bias.defined()) return;
  const auto device = selection_bias.device();
  if (selection_bias.element_size() < 4) selection_bias.set_data(bias.to(device));
  tokens_since_update = tokens_since_update.to(device);
}

void TopKGateImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  move(device, dtype, non_blocking);
}

void TopKGateImpl::to(torch::Dtype dtype, bool non_blocking) { move(dtype, non_blocking); }

void TopKGateImpl::to(torch::Device device, bool non_blocking) { move(device, non_blocking); }

Routing TopKGateImpl::forward(const Tensor& x) { return route(x, std::nullopt); }

Routing TopKGateImpl::replay(const Tensor& x, const Tensor& expert_index) {
  return route(x, expert_index);
}

Routing TopKGateImpl::route(const Tensor& x, const OptionalTensor& expert_index) {
  require_tokens("TopKGate", x, d_model());
  if (expert_index) require_defined("TopKGate", "expert_index", *expert_index);
  auto gate_logits = logits(x, w_gate);
  const auto type = gate_logits.scalar_type();
  if (b_gate.defined()) gate_logits = gate_logits + b_gate.to(type);
  OptionalTensor bias;
  if (selection_bias.defined()) bias = selection_bias.to(type);
  const auto kept = select(options, gate_logits, bias, expert_index);
  const auto routing = make_routing(kept.gates, kept.expert_index, std::nullopt, gate_logits,
                                    given_scores(gate_logits, options.score()));
  if (is_training() && tokens_since_update.defined()) {
    count_tokens(tokens_since_update, routing.load);
  }
  return routing;
}

void TopKGateImpl::update() {
  const torch::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(selection_bias.defined() && options.bias_update_rate(),
                    "TopKGate: bias_update_rate must be set for update(), got None");
  check_rate(options);
  const auto& counts = tokens_since_update;
  const auto below_mean = at::sign(counts.sum() - counts * num_experts());  // exact in int64
  selection_bias.add_(below_mean.to(selection_bias.scalar_type()) * *options.bias_update_rate());
  counts.zero_();
}

void update_gates(torch::nn::Module& module) {
  bool has_gate = false;
  module.apply([&](torch::nn::Module& child) {
    auto* gate = dynamic_cast<TopKGateImpl*>(&child);
    if (gate == nullptr || !gate->selection_bias.defined()) return;
    gate->update();
    has_gate = true;
  });
  TORCH_CHECK_VALUE(has_gate,
                    "update_gates: module must contain a TopKGate with bias_update_rate, got '",
                    class_of(module), "'");
}

}  // namespace moe_ext::nn
