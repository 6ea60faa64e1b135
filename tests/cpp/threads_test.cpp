// Threads: results do not depend on their number, and many threads may run one layer.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <thread>

#include "modules.h"

namespace {

using namespace exported;

class Threads : public testing::TestWithParam<std::string> {
 protected:
  void TearDown() override { at::set_num_threads(before_); }
  const int before_ = at::get_num_threads();
};

// Large enough that kernels divide their work.
constexpr int64_t num_tokens = 3000, width = 64;

const std::map<std::string, Maker> large = {
    {"noisy",
     [] {
       return MoE(MoEOptions(width, 16, 2).hidden_sizes(std::vector<int64_t>{96}).bias(true)).ptr();
     }},
    {"recompute",
     [] { return MoE(MoEOptions(width, 16, 2).activation("swiglu").recompute(true)).ptr(); }},
    {"bfloat16", [] { return MoE(MoEOptions(width, 16, 2).expert_dtype(torch::kBFloat16)).ptr(); }},
    {"shared",
     [] {
       TopKGate gate(
           TopKGateOptions(width, 16, 2).score("sigmoid").num_groups(4).bias_update_rate(0.1));
       SharedExpert shared(SharedExpertOptions(width, {96}).gated(true));
       return MoE(MoEOptions(width, 16, 2).gate(gate).shared_expert(shared)).ptr();
     }},
    {"hierarchical",
     [] {
       return HierarchicalMoE(HierarchicalMoEOptions(width, 4, 4, {2, 2})).ptr();
     }},
    {"balanced",
     [] {
       BalancedGate gate(BalancedGateOptions(width, 16, 2));
       return MoE(MoEOptions(width, 16, 2).gate(gate.ptr())).ptr();
     }},
    {"hierarchical_balanced",
     [] {
       HierarchicalBalancedGate gate(HierarchicalBalancedGateOptions(width, 4, 4, {2, 2}));
       return MoE(MoEOptions(width, 16, 4).gate(gate.ptr())).ptr();
     }},
};
INSTANTIATE_TEST_SUITE_P(, Threads, testing::ValuesIn(names_of(large)), test_name);

std::shared_ptr<torch::nn::Module> make(const std::string& name) {
  torch::manual_seed(1);
  const auto module = large.at(name)();
  torch::NoGradGuard guard;
  for (auto& parameter : module->parameters()) {
    parameter.add_(torch::randn(parameter.sizes()).mul(0.1));
  }
  return module;
}

TEST_P(Threads, DoNotChangeTheBits) {
  std::vector<StateDict> found;
  for (const int number : {1, 2, 4, 2}) {
    at::set_num_threads(number);
    ASSERT_EQ(at::get_num_threads(), number);
    const auto module = make(GetParam());
    torch::manual_seed(2);
    const Tree inputs({{"x", torch::randn({num_tokens, width})}});
    const auto [results, gradients] = step(
        *module, inputs, {{"y", torch::randn({num_tokens, width})}, {"loss", torch::ones({})}});
    found.push_back(gradients);
    found.back().insert(results.begin(), results.end());
    EXPECT_TRUE(gradients.contains("x") && gradients.contains("gate.w_gate"));
    expect_same_bits(found.back(), found.front());
  }
}

TEST_P(Threads, MayShareALayerInEvaluation) {
  at::set_num_threads(1);
  const auto module = make(GetParam());
  module->train();
  const Tree inputs({{"x", torch::randn({200, width})}});
  {
    torch::NoGradGuard guard;
    call(*module, inputs);  // sets the thresholds of balanced gates
    module->eval();
  }
  torch::NoGradGuard guard;
  const auto expected = call(*module, inputs);
  std::vector<StateDict> found(8);
  std::vector<std::thread> threads;
  for (auto& each : found) {
    threads.emplace_back([&] {
      torch::NoGradGuard own_guard;  // a guard acts on one thread
      for (int i = 0; i < 20; ++i) {
        each = call(*module, inputs);
        if (!same_bits(each.at("y"), expected.at("y"))) return;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& each : found) expect_same_bits(each, expected);
}

}  // namespace
