// Experts with stacked weights (Section 3.2).
#include <moe_ext/nn.h>
#include <torch/utils.h>

#include <cmath>
#include <mutex>
#include <string>
#include <utility>

#include "../activation.h"
#include "checks.h"

namespace moe_ext::nn {

namespace {

void check_sizes(const char* owner, int64_t num_experts, int64_t d_model, int64_t d_output) {
  require_size(owner, "num_experts", num_experts, 0);
  require_size(owner, "d_model", d_model);
  require_size(owner, "d_output", d_output);
}

int64_t d_output_of(const FeedForwardExpertsOptions& options) {
  return options.d_output().value_or(options.d_model());
}

// Checks the sizes before Experts does, whose messages do not name this class.
const FeedForwardExpertsOptions& checked(const FeedForwardExpertsOptions& options) {
  constexpr auto owner = "FeedForwardExperts";
  check_sizes(owner, options.num_experts(), options.d_model(), d_output_of(options));
  for (const int64_t width : options.hidden_sizes()) {
    TORCH_CHECK_VALUE(width >= 1, owner,
                      ": hidden_sizes must be a sequence of whole numbers, each at least 1, got [",
                      c10::Join(", ", options.hidden_sizes()), "]");
  }
  const auto& args = options.activation_args();
  if (args.size() == 3 && options.activation().ends_with("clamped_swiglu")) {
    require_positive("FeedForwardExperts: activation_args", "limit", args[0]);
  }
  check_activation(owner, options.activation(), args);
  require_dtype(owner, options.dtype());
  return options;
}

}  // namespace

Experts::Experts(int64_t num_experts, int64_t d_model, int64_t d_output)
    : num_experts_(num_experts), d_model_(d_model), d_output_(d_output) {
  check_sizes("Experts", num_experts, d_model, d_output);
}

FeedForwardExpertsOptions::FeedForwardExpertsOptions(int64_t num_experts, int64_t d_model)
    : num_experts_(num_experts), d_model_(d_model) {}

FeedForwardExpertsImpl::FeedForwardExpertsImpl(const FeedForwardExpertsOptions& options)
    : Experts(checked(options).num_experts(), options.d_model(), d_output_of(options)),
      options(options) {
  reset();
}

void FeedForwardExpertsImpl::reset() {
  const bool gated =
      check_activation("FeedForwardExperts", options.activation(), options.activation_args());
  const auto& hidden_sizes = options.hidden_sizes();
  const auto like = options.dtype() ? torch::dtype(*options.dtype()) : torch::TensorOptions();
  std::vector<Tensor> new_weights, new_biases;
  int64_t fan_in = d_model();
  for (size_t i = 0; i <= hidden_sizes.size(); ++i) {
    const bool last = i == hidden_sizes.size();
    const int64_t size = last ? d_output() : hidden_sizes[i];
    const int64_t width = gated && !last ? product_of("FeedForwardExperts",
                                                      "the width of a gated hidden layer", 2, size)
                                         : size;
    new_weights.push_back(torch::empty({num_experts(), fan_in, width}, like));
    if (options.bias()) new_biases.push_back(torch::empty({num_experts(), width}, like));
    fan_in = size;
  }
  // As in Python, the weights come before the biases.
  for (size_t i = 0; i < new_weights.size(); ++i) {
    register_parameter(c10::str("weight_", i), new_weights[i]);
  }
  for (size_t i = 0; i < new_biases.size(); ++i) {
    register_parameter(c10::str("bias_", i), new_biases[i]);
  }
  weights = std::move(new_weights);
  biases = std::move(new_biases);
  reset_parameters();
}

void FeedForwardExpertsImpl::reset_parameters() {
  const torch::NoGradGuard no_grad;
  const auto device = weights[0].device();
  if (device.is_meta()) return;
  const auto seed = torch::randint(int64_t{1} << 31, {}, torch::kLong).item<int64_t>();
  auto generator = at::globalContext().defaultGenerator(device);
  {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator = generator.clone();
  }
  for (int64_t e = 0; e < num_experts(); ++e) {
    generator.set_current_seed(seed + e);
    for (auto& weight : weights) {
      const double bound = std::sqrt(3.0 / static_cast<double>(weight.size(1)));
      weight.select(0, e).uniform_(-bound, bound, generator);
    }
  }
  for (auto& bias : biases) bias.zero_();
}

Tensor FeedForwardExpertsImpl::forward(const Tensor& x, const Tensor& offsets) {
  return forward_fused(x, {.offsets = offsets});
}

Tensor FeedForwardExpertsImpl::forward_fused(const Tensor& x,
                                             const ops::ExpertsOptions& options) const {
  try {
    return ops::experts(x, weights, biases, this->options.activation(), options,
                        this->options.activation_args());
  } catch (const c10::TypeError& error) {
    const std::string message = error.what_without_backtrace();
    if (message.find("x must have the dtype of the weights") == message.npos) throw;
    TORCH_CHECK_TYPE(false, message, "; use torch.autocast, cast x, or set expert_dtype of MoE ",
                     "(dtype of the experts)");
  }
}

void FeedForwardExpertsImpl::pretty_print(std::ostream& stream) const {
  stream << "moe_ext::nn::FeedForwardExperts(" << num_experts() << " x (";
  for (const auto& weight : weights) stream << weight.size(1) << " -> ";
  stream << d_output() << "), activation=" << options.activation();
  if (!options.activation_args().empty()) stream << options.activation_args();
  stream << std::boolalpha << ", bias=" << options.bias() << ", dtype=torch."
         << name_of(weights[0].scalar_type()) << ")";
}

}  // namespace moe_ext::nn
