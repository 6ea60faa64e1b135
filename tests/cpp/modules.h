// Layers. The name of each is the same layer in Python, which export.py evaluates.
#pragma once

#include <moe_ext/nn.h>

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "exported.h"

namespace exported {

using namespace moe_ext::nn;

constexpr int64_t D = 8;
using Maker = std::function<std::shared_ptr<torch::nn::Module>()>;

inline std::shared_ptr<torch::nn::Module> layer(const MoEOptions& options) {
  return MoE(options).ptr();
}

inline std::vector<std::shared_ptr<RouterLoss>> all_losses() {
  return {std::make_shared<SwitchLoss>(0.3), std::make_shared<SwitchLoss>(0.1, true),
          std::make_shared<ZLoss>(0.2)};
}

// Returns the options of a layer with a gate.
template <typename GateHolder>
MoEOptions with_gate(GateHolder gate) {
  return MoEOptions(D, gate->num_experts(), gate->k()).gate(gate.ptr());
}

inline std::map<std::string, Maker> make_layers() {
  const std::vector<double> clamped = {0.75, 1.5, 0.25};
  const auto pair = [](int64_t first, int64_t second) { return std::array{first, second}; };
  std::map<std::string, Maker> makers = {
      {"layer()", [] { return layer(MoEOptions(D, 6, 2)); }},
      {"layer(hidden_sizes=(5,), activation='swiglu', bias=True, recompute=True, w_importance=0.3, "
       "w_load=0, noise_epsilon=0.1)",
       [] {
         return layer(MoEOptions(D, 6, 2)
                          .hidden_sizes(std::vector<int64_t>{5})
                          .activation("swiglu")
                          .bias(true)
                          .recompute(true)
                          .w_importance(0.3)
                          .w_load(0)
                          .noise_epsilon(0.1));
       }},
      {"layer(generator=torch.Generator().manual_seed(11))",
       [] { return layer(MoEOptions(D, 6, 2).generator(at::detail::createCPUGenerator(11))); }},
      {"layer(expert_dtype=torch.bfloat16)",
       [] { return layer(MoEOptions(D, 6, 2).expert_dtype(torch::kBFloat16)); }},
      {"layer(NoisyTopKGate(D, 3, 3, noise_epsilon=0.5, detach_threshold=True))",
       [] {
         const auto options = NoisyTopKGateOptions(D, 3, 3).noise_epsilon(0.5);
         return layer(
             with_gate(NoisyTopKGate(NoisyTopKGateOptions(options).detach_threshold(true))));
       }},
      {"layer(SoftmaxGate(D, 6))", [] { return layer(with_gate(SoftmaxGate(D, 6))); }},
      {"layer(TopKGate(D, 6, 2, renormalize=False, bias_update_rate=0.1))",
       [] {
         return layer(with_gate(
             TopKGate(TopKGateOptions(D, 6, 2).renormalize(false).bias_update_rate(0.1))));
       }},
      {"layer(TopKGate(D, 6, 2, score='sigmoid', scale=2.5, logit_bias=True, "
       "bias_update_rate=0.1), losses=all_losses())",
       [] {
         const auto options = TopKGateOptions(D, 6, 2).score("sigmoid").scale(2.5).logit_bias(true);
         TopKGate gate(TopKGateOptions(options).bias_update_rate(0.1));
         return layer(with_gate(gate).losses(all_losses()));
       }},
      {"layer(TopKGate(D, 12, 3, score='sqrt_softplus', num_groups=4, groups_per_token=2, "
       "group_score_k=1))",
       [] {
         const auto options = TopKGateOptions(D, 12, 3).score("sqrt_softplus").num_groups(4);
         return layer(
             with_gate(TopKGate(TopKGateOptions(options).groups_per_token(2).group_score_k(1))));
       }},
      {"layer(ExpertChoiceGate(D, 6, 2), w_load=0)",
       [] { return layer(with_gate(ExpertChoiceGate(D, 6, 2)).w_load(0)); }},
      {"layer(BalancedGate(D, 6, 2), losses=all_losses())",
       [] {
         return layer(with_gate(BalancedGate(BalancedGateOptions(D, 6, 2))).losses(all_losses()));
       }},
      {"layer(batchwise(BalancedGate(D, 6, 2, detach_scores=False)))",
       [] {
         BalancedGate gate(BalancedGateOptions(D, 6, 2).detach_scores(false));
         gate->batchwise = true;
         return layer(with_gate(gate));
       }},
      {"layer(HierarchicalBalancedGate(D, 4, 3, (2, 1), detach_scores=False))",
       [=] {
         const HierarchicalBalancedGateOptions options(D, 4, 3, pair(2, 1));
         return layer(with_gate(HierarchicalBalancedGate(
             HierarchicalBalancedGateOptions(options).detach_scores(false))));
       }},
      {"layer(experts=FeedForwardExperts(6, D, (5,), d_output=3))",
       [] {
         const auto options = FeedForwardExpertsOptions(6, D).hidden_sizes({5}).d_output(3);
         return layer(MoEOptions(D, 6, 2).experts(FeedForwardExperts(options).ptr()));
       }},
      {"layer(losses=all_losses(), w_importance=0.2, w_load=0.3, shared_expert=SharedExpert(D, "
       "(5,), **CLAMPED))",
       [=] {
         const auto options = SharedExpertOptions(D, {5}).activation("clamped_swiglu");
         SharedExpert shared(SharedExpertOptions(options).activation_args(clamped));
         return layer(MoEOptions(D, 6, 2)
                          .losses(all_losses())
                          .w_importance(0.2)
                          .w_load(0.3)
                          .shared_expert(shared));
       }},
      {"layer(TopKGate(D, 6, 2), expert_dtype=torch.bfloat16, shared_expert=SharedExpert(D, (5, "
       "6), bias=True, dtype=torch.bfloat16, gated=True, recompute=True))",
       [] {
         TopKGate gate(D, 6, 2);
         SharedExpert shared(SharedExpertOptions(D, {5, 6})
                                 .bias(true)
                                 .dtype(torch::kBFloat16)
                                 .gated(true)
                                 .recompute(true));
         return layer(with_gate(gate).expert_dtype(torch::kBFloat16).shared_expert(shared));
       }},
      {"layer(shared_expert=nn.Linear(D, D))",
       [] { return layer(MoEOptions(D, 6, 2).shared_expert(torch::nn::Linear(D, D))); }},
      {"HierarchicalMoE(D, 4, 3, (2, 2), hidden_sizes=(5,))",
       [=] {
         const HierarchicalMoEOptions options(D, 4, 3, pair(2, 2));
         return HierarchicalMoE(
                    HierarchicalMoEOptions(options).hidden_sizes(std::vector<int64_t>{5}))
             .ptr();
       }},
      {"HierarchicalMoE(D, 4, 3, (2, 1), hidden_sizes=(5,), activation='tanh', bias=True, "
       "w_importance=0, noise_epsilon=0.1)",
       [=] {
         return HierarchicalMoE(HierarchicalMoEOptions(D, 4, 3, pair(2, 1))
                                    .hidden_sizes(std::vector<int64_t>{5})
                                    .activation("tanh")
                                    .bias(true)
                                    .w_importance(0)
                                    .noise_epsilon(0.1))
             .ptr();
       }},
      {"HierarchicalMoE(D, 4, 3, (2, 1), shared_expert=SharedExpert(D, (5,)), "
       "losses=[SwitchLoss(0.3)], gate=TopKGate(D, 12, 2, score='sigmoid', num_groups=4, "
       "groups_per_token=2), **CLAMPED)",
       [=] {
         SharedExpert shared(SharedExpertOptions(D, {5}));
         const auto options = TopKGateOptions(D, 12, 2).score("sigmoid").num_groups(4);
         TopKGate gate(TopKGateOptions(options).groups_per_token(2));
         return HierarchicalMoE(HierarchicalMoEOptions(D, 4, 3, pair(2, 1))
                                    .activation("clamped_swiglu")
                                    .activation_args(clamped)
                                    .shared_expert(shared)
                                    .losses({std::make_shared<SwitchLoss>(0.3)})
                                    .gate(gate))
             .ptr();
       }},
      {"HierarchicalMoE(D, 4, 3, (2, 1), gate=HierarchicalNoisyTopKGate(D, 4, 3, (2, 1), "
       "noise_epsilon=0.1, detach_threshold=True))",
       [=] {
         HierarchicalNoisyTopKGate gate(HierarchicalNoisyTopKGateOptions(D, 4, 3, pair(2, 1))
                                            .noise_epsilon(0.1)
                                            .detach_threshold(true));
         return HierarchicalMoE(HierarchicalMoEOptions(D, 4, 3, pair(2, 1)).gate(gate)).ptr();
       }},
  };
  for (const std::string name : {"relu", "relu_squared", "gelu", "gelu_tanh", "silu", "tanh",
                                 "sigmoid", "identity", "swiglu", "geglu", "reglu", "glu",
                                 "geglu_tanh", "clamped_swiglu", "interleaved_clamped_swiglu"}) {
    makers["activation " + name] = [=] {
      auto options = MoEOptions(D, 6, 2).hidden_sizes({5, 6}).activation(name).bias(true);
      if (name.ends_with("clamped_swiglu")) options.activation_args(clamped);
      return layer(options);
    };
  }
  return makers;
}
inline const std::map<std::string, Maker> layers = make_layers();

// Returns the results of a layer by the names of Python's tuples.
inline StateDict call(torch::nn::Module& module, const Tree& inputs) {
  StateDict named;
  const auto add = [&](const std::string& name, const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, Tensor>) {
      named[name] = value;
    } else if constexpr (std::is_same_v<Value, std::vector<Tensor>>) {
      for (size_t i = 0; i < value.size(); ++i) named[name + "/" + std::to_string(i)] = value[i];
    } else if constexpr (std::is_same_v<Value, std::map<std::string, Tensor>>) {
      for (const auto& [key, tensor] : value) named[name + "/" + key] = tensor;
    } else if (value) {  // an optional tensor
      named[name] = *value;
    }
  };
  const auto [y, aux] = dynamic_cast<MoEImpl&>(module).forward(inputs["x"], inputs.find("mask"),
                                                               inputs.find("expert_index"));
  add("y", y);
  add("loss", aux.loss);
  add("importance", aux.importance);
  add("load", aux.load);
  add("gates", aux.gates);
  add("expert_index", aux.expert_index);
  add("tokens_per_expert", aux.tokens_per_expert);
  add("token_offsets", aux.token_offsets);
  add("gate_metrics", aux.gate_metrics);
  add("load_factors", aux.load_factors);
  add("losses", aux.losses);
  return named;
}

// Runs forward and backward with the upstream gradients of export.py. Returns the results, and the
// gradients of the parameters and of x.
inline std::pair<StateDict, StateDict> step(torch::nn::Module& module, Tree inputs,
                                            const StateDict& upstream) {
  auto& x = inputs["x"];
  x = x.detach().clone().requires_grad_();
  module.zero_grad();
  auto results = call(module, inputs);
  std::vector<Tensor> outputs, gradients;
  for (const auto& [name, gradient] : upstream) {
    outputs.push_back(results.at(name));
    gradients.push_back(gradient);
  }
  if (!outputs.empty()) torch::autograd::backward(outputs, gradients);
  StateDict grads;
  const auto add = [&](const std::string& name, const Tensor& leaf) {
    if (leaf.grad().defined()) grads[name] = leaf.grad();
  };
  for (const auto& parameter : module.named_parameters()) add(parameter.key(), parameter.value());
  add("x", x);
  return {results, grads};
}

}  // namespace exported
