// The base class of all gates, their result, and the softmax over all experts (Eq. 2).
#include <moe_ext/nn.h>
#include <torch/nn/init.h>

#include <ostream>

#include "checks.h"
#include "logits.h"

namespace moe_ext::nn {

Tensor Routing::probabilities() const {
  if (!scores) {
    TORCH_CHECK_VALUE(logits, "Routing: logits must be set by the gate, got None");
    return at::softmax(*logits, -1);
  }
  const auto total = scores->sum(-1, /*keepdim=*/true);
  return *scores / at::where(total > 0, total, 1);
}

Gate::Gate(int64_t d_model, int64_t num_experts, int64_t k, const char* name)
    : d_model_(d_model), num_experts_(num_experts), k_(k) {
  require_size(name, "d_model", d_model);
  require_size(name, "num_experts", num_experts);
  require_k(name, k, num_experts);
}

Routing Gate::replay(const Tensor&, const Tensor& expert_index) {
  require_defined("MoE", "expert_index", expert_index);
  TORCH_CHECK_VALUE(false, "MoE: expert_index must be None for ",
                    class_of(dynamic_cast<const torch::nn::Module&>(*this)),
                    ", whose forward does not take it, got ", tuple_of(expert_index.sizes()));
}

Routing Gate::make_routing(const Tensor& gates, const Tensor& expert_index,
                           const OptionalTensor& load, const OptionalTensor& logits,
                           const OptionalTensor& scores) const {
  const auto sums =
      load ? ops::ImportanceAndLoad{ops::importance(gates, expert_index, num_experts_), *load}
           : ops::importance_and_load(gates, expert_index, num_experts_);
  return {.gates = gates,
          .expert_index = expert_index,
          .importance = sums.importance,
          .load = sums.load,
          .logits = logits,
          .scores = scores};
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
  require_tokens("SoftmaxGate", x, d_model());
  const auto gate_logits = logits(x, w_gate);
  const auto gates = at::softmax(gate_logits, -1);
  const auto expert = at::arange(num_experts(), x.options().dtype(at::kLong));
  return make_routing(gates, expert.expand({x.size(0), -1}), std::nullopt, gate_logits);
}

}  // namespace moe_ext::nn
