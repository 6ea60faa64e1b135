// The modules of export.py, under the same names.
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

// Makes modules with equal options. What the options hold, such as a generator, is shared.
template <typename Module, typename Options>
Maker make(const Options& options) {
  return [=] { return Module(options).ptr(); };
}

inline const std::map<std::string, Maker> gates = {
    {"SoftmaxGate", [] { return SoftmaxGate(D, 6).ptr(); }},
    {"TopKGate", [] { return TopKGate(D, 6, 2).ptr(); }},
    {"TopKGate sigmoid",
     make<TopKGate>(
         TopKGateOptions(D, 6, 2).score("sigmoid").scale(2.5).logit_bias(true).bias_update_rate(
             0.1))},
    {"TopKGate softmax",
     make<TopKGate>(TopKGateOptions(D, 6, 2).renormalize(false).bias_update_rate(0.1))},
    {"TopKGate groups", make<TopKGate>(TopKGateOptions(D, 12, 3)
                                           .score("sqrt_softplus")
                                           .num_groups(4)
                                           .groups_per_token(2)
                                           .group_score_k(1))},
    {"NoisyTopKGate", make<NoisyTopKGate>(NoisyTopKGateOptions(D, 6, 2))},
    {"NoisyTopKGate k=E", make<NoisyTopKGate>(NoisyTopKGateOptions(D, 3, 3).noise_epsilon(0.5))},
    {"NoisyTopKGate detached",
     make<NoisyTopKGate>(NoisyTopKGateOptions(D, 6, 2).detach_threshold(true))},
    {"NoisyTopKGate generator",
     [] {
       return NoisyTopKGate(
                  NoisyTopKGateOptions(D, 6, 2).generator(at::detail::createCPUGenerator(11)))
           .ptr();
     }},
    {"HierarchicalNoisyTopKGate",
     make<HierarchicalNoisyTopKGate>(HierarchicalNoisyTopKGateOptions(D, 4, 3, {2, 2}))},
    {"HierarchicalNoisyTopKGate detached",
     make<HierarchicalNoisyTopKGate>(HierarchicalNoisyTopKGateOptions(D, 4, 3, {2, 1})
                                         .noise_epsilon(0.1)
                                         .detach_threshold(true))},
    {"HierarchicalNoisyTopKGate a=1",
     make<HierarchicalNoisyTopKGate>(HierarchicalNoisyTopKGateOptions(D, 1, 5, {1, 2}))},
    {"HierarchicalNoisyTopKGate b=1",
     make<HierarchicalNoisyTopKGate>(HierarchicalNoisyTopKGateOptions(D, 5, 1, {2, 1}))},
    {"ExpertChoiceGate", [] { return ExpertChoiceGate(D, 6, 2).ptr(); }},
    {"BalancedGate", make<BalancedGate>(BalancedGateOptions(D, 6, 2))},
    {"BalancedGate attached",
     make<BalancedGate>(BalancedGateOptions(D, 6, 2).detach_scores(false))},
    {"BalancedGate batchwise",
     [] {
       BalancedGate gate(BalancedGateOptions(D, 6, 2));
       gate->batchwise = true;
       return gate.ptr();
     }},
    {"HierarchicalBalancedGate",
     make<HierarchicalBalancedGate>(HierarchicalBalancedGateOptions(D, 4, 3, {2, 2}))},
    {"HierarchicalBalancedGate attached",
     make<HierarchicalBalancedGate>(
         HierarchicalBalancedGateOptions(D, 4, 3, {2, 1}).detach_scores(false))},
};

inline std::map<std::string, Maker> make_experts() {
  std::map<std::string, Maker> found = {
      {"linear", make<FeedForwardExperts>(FeedForwardExpertsOptions(4, D).d_output(3))},
      {"double", make<FeedForwardExperts>(
                     FeedForwardExpertsOptions(4, D).hidden_sizes({5}).dtype(torch::kDouble))},
      {"bfloat16", make<FeedForwardExperts>(
                       FeedForwardExpertsOptions(4, D).hidden_sizes({5}).dtype(torch::kBFloat16))},
  };
  for (const std::string name :
       {"relu", "relu_squared", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "identity",
        "swiglu", "geglu", "reglu", "glu", "geglu_tanh"}) {
    found[name] = [name] {
      return FeedForwardExperts(
                 FeedForwardExpertsOptions(4, D).hidden_sizes({5, 6}).activation(name).bias(true))
          .ptr();
    };
  }
  for (const std::string name : {"clamped_swiglu", "interleaved_clamped_swiglu"}) {
    found[name] = [name] {
      return FeedForwardExperts(FeedForwardExpertsOptions(4, D)
                                    .hidden_sizes({5, 6})
                                    .activation(name)
                                    .activation_args({0.75, 1.5, 0.25})
                                    .bias(true))
          .ptr();
    };
  }
  std::map<std::string, Maker> named;
  for (const auto& [name, make] : found) named["FeedForwardExperts " + name] = make;
  return named;
}
inline const std::map<std::string, Maker> experts = make_experts();

inline std::vector<std::shared_ptr<RouterLoss>> all_losses() {
  return {std::make_shared<SwitchLoss>(0.3), std::make_shared<SwitchLoss>(0.1, true),
          std::make_shared<ZLoss>(0.2)};
}

inline const std::map<std::string, Maker> layers = {
    {"MoE", make<MoE>(MoEOptions(D, 6, 2))},
    {"MoE options", make<MoE>(MoEOptions(D, 6, 2)
                                  .hidden_sizes(std::vector<int64_t>{5})
                                  .activation("swiglu")
                                  .bias(true)
                                  .recompute(true)
                                  .w_importance(0.3)
                                  .w_load(0)
                                  .noise_epsilon(0.1))},
    {"MoE generator",
     [] { return MoE(MoEOptions(D, 6, 2).generator(at::detail::createCPUGenerator(11))).ptr(); }},
    {"MoE bfloat16", make<MoE>(MoEOptions(D, 6, 2).expert_dtype(torch::kBFloat16))},
    {"MoE SoftmaxGate",
     [] { return MoE(MoEOptions(D, 6, 6).gate(SoftmaxGate(D, 6).ptr())).ptr(); }},
    {"MoE TopKGate", [] { return MoE(MoEOptions(D, 6, 2).gate(TopKGate(D, 6, 2).ptr())).ptr(); }},
    {"MoE BalancedGate",
     [] {
       return MoE(MoEOptions(D, 6, 2).gate(BalancedGate(BalancedGateOptions(D, 6, 2)).ptr())).ptr();
     }},
    {"MoE HierarchicalBalancedGate",
     [] {
       const HierarchicalBalancedGateOptions options(D, 4, 3, {2, 2});
       return MoE(MoEOptions(D, 12, 4).gate(HierarchicalBalancedGate(options).ptr())).ptr();
     }},
    {"MoE experts",
     [] {
       const auto options = FeedForwardExpertsOptions(6, D).hidden_sizes({5}).d_output(3);
       return MoE(MoEOptions(D, 6, 2).experts(FeedForwardExperts(options).ptr())).ptr();
     }},
    {"MoE ExpertChoiceGate",
     [] { return MoE(MoEOptions(D, 6, 2).gate(ExpertChoiceGate(D, 6, 2)).w_load(0)).ptr(); }},
    {"MoE losses",
     [] {
       const auto options = TopKGateOptions(D, 6, 2).score("sigmoid").bias_update_rate(0.1);
       return MoE(MoEOptions(D, 6, 2).losses(all_losses()).gate(TopKGate(options))).ptr();
     }},
    {"MoE noisy losses",
     make<MoE>(MoEOptions(D, 6, 2).losses(all_losses()).w_importance(0.2).w_load(0.3))},
    {"MoE losses of slots",
     [] {
       BalancedGate gate(BalancedGateOptions(D, 6, 2));
       return MoE(MoEOptions(D, 6, 2).losses(all_losses()).gate(gate)).ptr();
     }},
    {"MoE activation_args", make<MoE>(MoEOptions(D, 6, 2)
                                          .hidden_sizes({5})
                                          .activation("clamped_swiglu")
                                          .activation_args({0.75, 1.5, 0.25}))},
    {"MoE shared",
     [] {
       SharedExpert shared(SharedExpertOptions(D, {5})
                               .activation("clamped_swiglu")
                               .activation_args({0.75, 1.5, 0.25}));
       return MoE(MoEOptions(D, 6, 2).shared_expert(shared)).ptr();
     }},
    {"MoE shared gated",
     [] {
       TopKGate gate(D, 6, 2);
       SharedExpert shared(SharedExpertOptions(D, {5, 6})
                               .bias(true)
                               .dtype(torch::kBFloat16)
                               .gated(true)
                               .recompute(true));
       return MoE(MoEOptions(D, 6, 2)
                      .expert_dtype(torch::kBFloat16)
                      .gate(gate)
                      .shared_expert(shared))
           .ptr();
     }},
    {"MoE shared linear",
     [] { return MoE(MoEOptions(D, 6, 2).shared_expert(torch::nn::Linear(D, D))).ptr(); }},
    {"HierarchicalMoE",
     make<HierarchicalMoE>(
         HierarchicalMoEOptions(D, 4, 3, {2, 2}).hidden_sizes(std::vector<int64_t>{5}))},
    {"HierarchicalMoE options", make<HierarchicalMoE>(HierarchicalMoEOptions(D, 4, 3, {2, 1})
                                                          .hidden_sizes(std::vector<int64_t>{5})
                                                          .activation("tanh")
                                                          .bias(true)
                                                          .w_importance(0)
                                                          .noise_epsilon(0.1))},
    {"HierarchicalMoE shared",
     [] {
       SharedExpert shared(SharedExpertOptions(D, {5}));
       TopKGate gate(TopKGateOptions(D, 12, 2).score("sigmoid").num_groups(4).groups_per_token(2));
       return HierarchicalMoE(HierarchicalMoEOptions(D, 4, 3, {2, 1})
                                  .activation("clamped_swiglu")
                                  .activation_args({0.75, 1.5, 0.25})
                                  .shared_expert(shared)
                                  .losses({std::make_shared<SwitchLoss>(0.3)})
                                  .gate(gate))
           .ptr();
     }},
};

inline std::map<std::string, Maker> all_modules() {
  auto found = gates;
  found.insert(experts.begin(), experts.end());
  found.insert(layers.begin(), layers.end());
  return found;
}

// Returns the results of a module by the names of Python's tuples.
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
  const auto given = inputs.find("expert_index");
  if (auto* gate = dynamic_cast<Gate*>(&module)) {
    const auto routing = given ? gate->replay(inputs["x"], *given) : gate->forward(inputs["x"]);
    add("gates", routing.gates);
    add("expert_index", routing.expert_index);
    add("importance", routing.importance);
    add("load", routing.load);
    add("token_offsets", routing.token_offsets);
    add("equal_load", torch::tensor(routing.equal_load));
    add("loss", routing.loss);
    add("metrics", routing.metrics);
    add("load_factors", routing.load_factors);
    add("logits", routing.logits);
    add("scores", routing.scores);
    if (routing.logits) add("probabilities", routing.probabilities());
  } else if (auto* experts = dynamic_cast<Experts*>(&module)) {
    add("y", experts->forward(inputs["x"], inputs["offsets"]));
  } else {
    const auto [y, aux] =
        dynamic_cast<MoEImpl&>(module).forward(inputs["x"], inputs.find("mask"), given);
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
  }
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
  StateDict found;
  const auto add = [&](const std::string& name, const Tensor& leaf) {
    if (leaf.grad().defined()) found[name] = leaf.grad();
  };
  for (const auto& parameter : module.named_parameters()) add(parameter.key(), parameter.value());
  add("x", x);
  return {results, found};
}

}  // namespace exported
