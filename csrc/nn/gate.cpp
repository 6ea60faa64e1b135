// The base class of all gates, and the gates without noise: the softmax over all experts, and the
// softmax over the top k.
#include <moe_ext/nn.h>
#include <torch/nn/init.h>

#include <cmath>
#include <ostream>

#include "checks.h"
#include "logits.h"

namespace moe_ext::nn {

Gate::Gate(int64_t d_model, int64_t num_experts, int64_t k, const char* name)
    : d_model_(d_model), num_experts_(num_experts), k_(k) {
  require_size(name, "d_model", d_model);
  require_size(name, "num_experts", num_experts);
  require_k(name, k, num_experts);
}

Routing Gate::make_routing(const Tensor& gates, const Tensor& expert_index,
                           const OptionalTensor& load) const {
  const auto counts = [&] {
    return ops::importance(at::ones_like(gates), expert_index, num_experts_);
  };
  return {.gates = gates,
          .expert_index = expert_index,
          .importance = ops::importance(gates, expert_index, num_experts_),
          .load = load ? *load : counts()};
}

SoftmaxGateImpl::SoftmaxGateImpl(int64_t d_model, int64_t num_experts)
    : Gate(d_model, num_experts, num_experts, "SoftmaxGate") {
  reset();
}

void SoftmaxGateImpl::reset() {
  w_gate = register_parameter("w_gate", torch::empty({d_model(), num_experts()}));
  reset_parameters();
}

void SoftmaxGateImpl::reset_parameters() { torch::nn::init::zeros_(w_gate); }

void SoftmaxGateImpl::pretty_print(std::ostream& stream) const {
  stream << "moe_ext::nn::SoftmaxGate(d_model=" << d_model() << ", num_experts=" << num_experts()
         << ")";
}

Routing SoftmaxGateImpl::forward(const Tensor& x) {
  const auto gates = at::softmax(logits(x, w_gate), -1);
  const auto expert = at::arange(num_experts(), x.options().dtype(at::kLong));
  return make_routing(gates, expert.expand({x.size(0), -1}));
}

TopKGateImpl::TopKGateImpl(int64_t d_model, int64_t num_experts, int64_t k)
    : Gate(d_model, num_experts, k, "TopKGate") {
  reset();
}

void TopKGateImpl::reset() {
  w_gate = register_parameter("w_gate", torch::empty({d_model(), num_experts()}));
  reset_parameters();
}

void TopKGateImpl::reset_parameters() {
  // With W_g = 0, every token would be routed to the same experts.
  torch::nn::init::normal_(w_gate, 0, 0.1 * std::pow(d_model(), -0.5));
}

void TopKGateImpl::pretty_print(std::ostream& stream) const {
  stream << "moe_ext::nn::TopKGate(d_model=" << d_model() << ", num_experts=" << num_experts()
         << ", k=" << k() << ")";
}

Routing TopKGateImpl::forward(const Tensor& x) {
  const auto kept = ops::noisy_topk_gating(logits(x, w_gate), std::nullopt, std::nullopt, k());
  return make_routing(kept.gates, kept.expert_index);
}

}  // namespace moe_ext::nn
