// The layer (Section 2) and its hierarchical form (Appendix B).
#include <ATen/ops/_unsafe_view.h>
#include <c10/util/accumulate.h>
#include <moe_ext/nn.h>

#include <algorithm>
#include <array>
#include <limits>
#include <ostream>
#include <set>
#include <typeinfo>

#include "checks.h"

namespace moe_ext::nn {

namespace {

using Module = std::shared_ptr<torch::nn::Module>;

template <typename Contract>
Module module_of(const std::shared_ptr<Contract>& child) {
  return std::dynamic_pointer_cast<torch::nn::Module>(child);
}

// Returns the module as a `Contract`, which is Gate or Experts.
template <typename Contract>
std::shared_ptr<Contract> checked_child(const char* name, const char* contract,
                                        const Module& module) {
  const auto child = std::dynamic_pointer_cast<Contract>(module);
  TORCH_CHECK_TYPE(child, "MoE: ", name, " must derive from moe_ext::nn::", contract, ", got ",
                   module->name());
  return child;
}

// Returns a clone of a child. A class that derives from a gate inherits its clone(), which would
// return the gate instead.
Module clone_of(const torch::nn::Module& child, const std::optional<torch::Device>& device) {
  const auto clone = child.clone(device);
  const torch::nn::Module& copy = *clone;
  TORCH_CHECK_TYPE(typeid(copy) == typeid(child), "MoE: ", child.name(),
                   " must override clone(), got a clone of type ", copy.name());
  return clone;
}

// LibTorch often writes an absent tensor as an undefined one.
OptionalTensor defined(const OptionalTensor& tensor) {
  return tensor && tensor->defined() ? tensor : std::nullopt;
}

void check_size(const char* name, int64_t given, int64_t expected, const char* where = "") {
  TORCH_CHECK_VALUE(given == expected, "MoE: ", name, " must be ", expected, where, ", got ",
                    given);
}

// Returns the weight of a loss of the paper, which is 0 by default if other losses replace them.
double weight_of(const std::optional<double>& weight, const MoEOptions& options) {
  return weight.value_or(options.losses().empty() ? 0.1 : 0.0);
}

// Returns the weights of the importance loss and of the load loss.
std::array<double, 2> weights_of(const MoEOptions& options) {
  const double w_importance = weight_of(options.w_importance(), options);
  const double w_load = weight_of(options.w_load(), options);
  require_at_least("MoE", "w_importance", w_importance, 0);
  require_at_least("MoE", "w_load", w_load, 0);
  return {w_importance, w_load};
}

void check_losses(const std::vector<std::shared_ptr<RouterLoss>>& losses) {
  std::set<std::string> names;
  std::vector<std::string> quoted;
  for (const auto& loss : losses) {
    TORCH_CHECK_VALUE(loss, "MoE: losses must be pointers to a RouterLoss, got null");
    names.insert(loss->name());
    quoted.push_back(c10::str("'", loss->name(), "'"));
  }
  TORCH_CHECK_VALUE(names.size() == losses.size(), "MoE: losses must have different names, got [",
                    c10::Join(", ", quoted), "]");
}

void check_options(const MoEOptions& options) {
  constexpr auto owner = "MoE";
  require_size(owner, "d_model", options.d_model());
  require_size(owner, "num_experts", options.num_experts());
  require_k(owner, options.k(), options.num_experts());
  weights_of(options);
  TORCH_CHECK_VALUE(!options.gate() || !(options.noise_epsilon() || options.generator()),
                    "MoE: noise_epsilon and generator must be left out when gate is given");
  const bool own = options.hidden_sizes() || options.activation() != "relu" ||
                   !options.activation_args().empty() || options.bias() || options.expert_dtype();
  TORCH_CHECK_VALUE(!options.experts() || !own,
                    "MoE: hidden_sizes, activation, activation_args, bias and expert_dtype must be "
                    "left out when experts are given");
  check_losses(options.losses());
}

// Returns the options of a default gate with those of the noise.
template <typename GateOptions>
GateOptions with_noise(GateOptions gate, const MoEOptions& options) {
  if (const auto& noise_epsilon = options.noise_epsilon()) gate.noise_epsilon(*noise_epsilon);
  return gate.generator(options.generator());
}

Module default_gate(const MoEOptions& options) {
  return std::make_shared<NoisyTopKGateImpl>(with_noise(
      NoisyTopKGateOptions(options.d_model(), options.num_experts(), options.k()), options));
}

Module default_experts(const MoEOptions& options) {
  auto hidden_sizes = options.hidden_sizes();
  if (!hidden_sizes) hidden_sizes = {product_of("MoE", "4 * d_model", 4, options.d_model())};
  return std::make_shared<FeedForwardExpertsImpl>(
      FeedForwardExpertsOptions(options.num_experts(), options.d_model())
          .hidden_sizes(*hidden_sizes)
          .activation(options.activation())
          .activation_args(options.activation_args())
          .bias(options.bias())
          .dtype(options.expert_dtype()));
}

void print(std::ostream& stream, const char* name, const MoEOptions& options) {
  stream << name << "(d_model=" << options.d_model() << ", num_experts=" << options.num_experts()
         << ", k=" << options.k() << std::boolalpha << ", recompute=" << options.recompute()
         << ", w_importance=" << weight_of(options.w_importance(), options)
         << ", w_load=" << weight_of(options.w_load(), options);
  for (const auto& loss : options.losses()) stream << ", " << loss->name() << "=" << loss->weight;
  stream << ")";
}

// Returns the offsets [S + 1] of the sequences of x [..., T, D] among its real tokens. mask: [...,
// T] bool, true at real tokens; absent: all tokens are real.
Tensor sequence_offsets_of(const Tensor& x, const OptionalTensor& mask) {
  const auto leading = x.sizes().slice(0, std::max<int64_t>(x.dim() - 2, 0));
  const int64_t num_sequences = c10::multiply_integers(leading);
  const int64_t length = x.dim() >= 2 ? x.size(-2) : 1;
  if (!mask) return at::arange(num_sequences + 1, x.options().dtype(at::kLong)) * length;
  const auto num_tokens = mask->reshape({num_sequences, length}).sum(1);
  return at::constant_pad_nd(num_tokens.cumsum(0), {1, 0});
}

}  // namespace

std::map<std::string, double> MoEAux::metrics() const {
  const torch::NoGradGuard no_grad;
  const auto cv = [](const Tensor& values) {
    return cv_squared(values.to(torch::kDouble)).sqrt().item<double>();
  };
  const auto load_double = load.to(torch::kDouble);
  std::map<std::string, double> result = {
      {"cv_importance", cv(importance)},
      {"cv_load", cv(load)},
      {"max_over_mean_load",
       (load_double.max() / load_double.mean().clamp_min(1e-30)).item<double>()},
      {"cv_tokens", cv(tokens_per_expert)}};
  for (const auto* values : {&gate_metrics, &losses}) {
    for (const auto& [name, value] : *values) result[name] = value.item<double>();
  }
  return result;
}

MoEOptions::MoEOptions(int64_t d_model, int64_t num_experts, int64_t k)
    : d_model_(d_model), num_experts_(num_experts), k_(k) {}

MoEImpl::MoEImpl(const MoEOptions& options) : options(options) {
  check_options(options);
  reset();
}

void MoEImpl::reset() {
  const auto gate = options.gate() ? options.gate() : default_gate(options);
  const auto checked_gate = checked_child<Gate>("gate", "Gate", gate);
  check_size("gate.d_model", checked_gate->d_model(), options.d_model());
  check_size("gate.num_experts", checked_gate->num_experts(), options.num_experts());
  check_size("gate.k", checked_gate->k(), options.k());
  const auto experts = options.experts() ? options.experts() : default_experts(options);
  const auto checked_experts = checked_child<Experts>("experts", "Experts", experts);
  check_size("experts.d_model", checked_experts->d_model(), options.d_model());
  check_size("experts.num_experts", checked_experts->num_experts(), options.num_experts(),
             " on this rank");
  TORCH_CHECK_VALUE(
      !options.recompute() || std::dynamic_pointer_cast<FeedForwardExpertsImpl>(experts),
      "MoE: recompute must be false for experts other than FeedForwardExperts, got true");
  const auto shared_expert =
      options.shared_expert().is_empty() ? nullptr : options.shared_expert().ptr();
  if (const auto* shared = dynamic_cast<const SharedExpertImpl*>(shared_expert.get())) {
    const auto width = shared->options.d_model();
    TORCH_CHECK_VALUE(width == options.d_model(),
                      "MoE: shared_expert.expert.d_model must be d_model = ", options.d_model(),
                      ", got ", width);
  }
  register_module("gate", gate);
  register_module("experts", experts);
  if (shared_expert) register_module("shared_expert", shared_expert);
  gate_ = checked_gate;
  experts_ = checked_experts;
}

void MoEImpl::pretty_print(std::ostream& stream) const {
  print(stream, "moe_ext::nn::MoE", options);
}

Module MoEImpl::clone(const std::optional<torch::Device>& device) const {
  auto copy = std::make_shared<MoEImpl>(*this);
  copy->clone_children(device);
  return copy;
}

void MoEImpl::clone_children(const std::optional<torch::Device>& device) {
  const auto gate = clone_of(*module_of(gate_), device);
  const auto experts = clone_of(*module_of(experts_), device);
  gate_ = checked_child<Gate>("gate", "Gate", gate);
  experts_ = checked_child<Experts>("experts", "Experts", experts);
  if (options.gate()) options.gate(gate);
  if (options.experts()) options.experts(experts);
  replace_module("gate", gate);
  replace_module("experts", experts);
  if (auto& shared_expert = options.shared_expert(); !shared_expert.is_empty()) {
    const auto copy = shared_expert.clone(device);
    TORCH_CHECK_TYPE(copy.ptr(), "MoE: ", shared_expert.ptr()->name(), " must override clone()");
    shared_expert = copy;
    replace_module("shared_expert", copy.ptr());
  }
}

std::tuple<Tensor, MoEAux> MoEImpl::forward(const Tensor& x, const OptionalTensor& optional_mask,
                                            const OptionalTensor& expert_index) {
  const int64_t d_model = options.d_model();
  const auto mask = defined(optional_mask);
  require_dense("MoE", x);
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) == d_model,
                    "MoE: x must have a last dimension of d_model = ", d_model, ", got shape ",
                    tuple_of(x.sizes()));
  require_floating("MoE", x);
  // Autocast caches a cast of x, but not of a view.
  auto tokens = x.dim() == 2 ? x : x.reshape({-1, d_model});
  Tensor position;
  if (mask) {
    require_mask("MoE", *mask, x.sizes().slice(0, x.dim() - 1));
    position = mask->reshape(-1).nonzero().squeeze(1);
    tokens = tokens.index_select(0, position);
  }

  OptionalTensor given = defined(expert_index);
  if (given) {
    const auto leading = given->sizes().slice(0, std::max<int64_t>(given->dim() - 1, 0));
    if (mask && given->dim() > 0 && leading == mask->sizes()) {
      given = given->reshape({mask->numel(), given->size(-1)}).index_select(0, position);
    }
    given = checked_index(*given, tokens);
  }
  const auto routing = given ? gate_->replay(tokens, *given) : gate_->forward(tokens);
  TORCH_CHECK_VALUE(routing.importance.numel() == options.num_experts(),
                    "MoE: num_experts must be ", routing.importance.numel(),
                    ", the gate's number of experts, got ", options.num_experts());
  const auto plan = ops::dispatch_plan(routing.expert_index, options.num_experts());
  auto y = mixture(tokens, routing, plan).to(x.scalar_type());
  if (routing.token_offsets) {
    // Without an expert, the output of a token with NaN would be 0.
    const auto finite = tokens.isfinite().all(/*dim=*/1, /*keepdim=*/true);
    y = y.masked_fill(finite.logical_not(), std::numeric_limits<double>::quiet_NaN());
  }
  if (auto& shared_expert = options.shared_expert(); !shared_expert.is_empty()) {
    const auto shared = shared_expert.forward(cast(tokens));
    TORCH_CHECK_VALUE(shared.sizes() == y.sizes(),
                      "MoE: shared_expert must return [T, d_output = ", y.size(1), "], got ",
                      shared.sizes());
    y = y + shared.to(y.scalar_type());
  }

  if (mask) y = y.new_zeros({mask->numel(), y.size(-1)}).index_copy(0, position, y);
  // L_importance + L_load in one operator; a gate may return another type for the load.
  auto loss = ops::weighted_cv_squared(
      {routing.importance, routing.load.to(routing.importance.scalar_type())}, weights_of(options));
  if (routing.loss) loss = loss + *routing.loss;
  std::map<std::string, Tensor> losses;
  if (!options.losses().empty()) {
    const auto sequence_offsets = sequence_offsets_of(x, mask);
    for (const auto& router_loss : options.losses()) {
      const auto sums = router_loss->sums(routing, plan.tokens_per_expert, sequence_offsets);
      const auto value = router_loss->value(sums);
      loss = loss + value * router_loss->checked_weight();
      losses[router_loss->name()] = value.detach();
    }
  }
  auto shape = x.sizes().vec();
  shape.back() = y.size(-1);
  // Like matmul, return no autograd view, so that the caller can modify y in place.
  return {at::_unsafe_view(y, shape), MoEAux{.loss = loss,
                                             .importance = routing.importance,
                                             .load = routing.load,
                                             .gates = routing.gates,
                                             .expert_index = routing.expert_index,
                                             .tokens_per_expert = plan.tokens_per_expert,
                                             .token_offsets = routing.token_offsets,
                                             .gate_metrics = routing.metrics,
                                             .load_factors = routing.load_factors,
                                             .losses = losses}};
}

Tensor MoEImpl::checked_index(const Tensor& expert_index, const Tensor& tokens) const {
  const auto type = expert_index.scalar_type();
  TORCH_CHECK_TYPE(type == at::kLong || type == at::kInt,
                   "MoE: expert_index must have dtype int64 or int32, got torch.", name_of(type));
  const int64_t k = options.k(), num_experts = options.num_experts();
  TORCH_CHECK_VALUE(expert_index.dim() > 0 && expert_index.size(-1) == k &&
                        expert_index.numel() == tokens.size(0) * k,
                    "MoE: expert_index must have shape [..., k = ", k,
                    "] with one row for each token of x, got ", tuple_of(expert_index.sizes()));
  const auto index = expert_index.reshape({-1, k}).to(at::kLong);
  // A check on CUDA would make the host synchronize with the device.
  if (!index.is_cpu() || index.numel() == 0) return index;
  const auto low = index.min().item<int64_t>(), high = index.max().item<int64_t>();
  TORCH_CHECK_VALUE(low >= 0 && high < num_experts,
                    "MoE: expert_index must be at least 0 and below gate.num_experts = ",
                    num_experts, ", got ", low < 0 ? low : high);
  const auto same = (std::get<0>(index.sort(1)).diff(1, 1) == 0).any(1);
  if (same.any().item<bool>()) {
    const auto wrong = index[same.nonzero()[0].item<int64_t>()].contiguous();
    TORCH_CHECK_VALUE(false, "MoE: expert_index must have different experts for each token, got ",
                      at::IntArrayRef(wrong.const_data_ptr<int64_t>(), k));
  }
  return index;
}

Tensor MoEImpl::cast(const Tensor& x) const {
  if (!options.expert_dtype()) return x;
  return x.to(dynamic_cast<const FeedForwardExpertsImpl&>(*experts_).weights[0].scalar_type());
}

Tensor MoEImpl::mixture(const Tensor& x, const Routing& routing,
                        const ops::DispatchPlan& plan) const {
  const auto& [gates, token_offsets] = std::tie(routing.gates, routing.token_offsets);
  if (const auto* fused = dynamic_cast<const FeedForwardExpertsImpl*>(experts_.get())) {
    return fused->forward_fused(
        cast(x), {.offsets = routing.equal_load ? std::nullopt : OptionalTensor(plan.offsets),
                  .inverse = plan.inverse,
                  .gates = gates,
                  .token_offsets = token_offsets,
                  .recompute = options.recompute()});
  }
  const auto rows = experts_->forward(ops::dispatch(x, plan.inverse, token_offsets), plan.offsets);
  TORCH_CHECK_VALUE(rows.size(-1) == experts_->d_output(),
                    "MoE: experts must return [R, d_output = ", experts_->d_output(), "], got ",
                    rows.size(-1));
  // Experts may return any dtype.
  return ops::combine(rows.to(x.scalar_type()), gates, plan.inverse, token_offsets);
}

HierarchicalMoEOptions::HierarchicalMoEOptions(int64_t d_model, int64_t num_groups,
                                               int64_t experts_per_group, std::array<int64_t, 2> k)
    : d_model_(d_model),
      num_groups_(num_groups),
      experts_per_group_(experts_per_group),
      k_(k),
      layer_(0, 0, 0) {}

MoEOptions HierarchicalMoEOptions::flat() const {
  const int64_t num_experts =
      num_experts_of_levels("HierarchicalMoE", d_model_, num_groups_, experts_per_group_, k_);
  auto options = layer_;
  options.d_model(d_model_).num_experts(num_experts).k(k_of_levels("HierarchicalMoE", k_));
  if (!options.gate()) {
    options.gate(std::make_shared<HierarchicalNoisyTopKGateImpl>(with_noise(
        HierarchicalNoisyTopKGateOptions(d_model_, num_groups_, experts_per_group_, k_), options)));
    // MoE takes no gate with options of the noise.
    options.noise_epsilon(std::nullopt).generator(std::nullopt);
  }
  return options;
}

HierarchicalMoEImpl::HierarchicalMoEImpl(const HierarchicalMoEOptions& options)
    : MoEImpl(options.flat()) {}

void HierarchicalMoEImpl::pretty_print(std::ostream& stream) const {
  print(stream, "moe_ext::nn::HierarchicalMoE", options);
}

Module HierarchicalMoEImpl::clone(const std::optional<torch::Device>& device) const {
  auto copy = std::make_shared<HierarchicalMoEImpl>(*this);
  copy->clone_children(device);
  return copy;
}

}  // namespace moe_ext::nn
