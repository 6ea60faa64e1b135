// Modules, losses and the optimizer throw errors with the class and the text of Python.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <moe_ext/nn.h>
#include <moe_ext/optim.h>
#include <moe_ext/state_dict.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "exported.h"

namespace {

using namespace exported;
using namespace moe_ext::nn;
namespace ops = moe_ext::ops;
using moe_ext::optim::FactoredAdam;
using moe_ext::optim::FactoredAdamOptions;

using Call = std::function<void()>;

void optimize(const FactoredAdamOptions& options, torch::Dtype dtype = torch::kFloat) {
  FactoredAdam({torch::zeros({2, 3}, dtype)}, options);
}

void without_logits(std::shared_ptr<RouterLoss> loss) {
  HierarchicalMoE layer(HierarchicalMoEOptions(8, 2, 3, {1, 1}).losses({std::move(loss)}));
  layer->forward(torch::zeros({3, 8}));
}

void replay(const Tensor& expert_index) {
  MoE layer(MoEOptions(8, 6, 2).gate(TopKGate(8, 6, 2)));
  layer->forward(torch::zeros({3, 8}), {}, expert_index);
}

Tensor zeros(auto... sizes) { return torch::zeros({sizes...}); }

std::array<int64_t, 2> pair(int64_t first, int64_t second) { return {first, second}; }

constexpr double inf = std::numeric_limits<double>::infinity();

struct SumImpl : torch::nn::Cloneable<SumImpl> {
  void reset() override {}
  Tensor forward(const Tensor& x) { return x.sum(0, /*keepdim=*/true); }
};
TORCH_MODULE(Sum);

struct WiderExpertsImpl : torch::nn::Cloneable<WiderExpertsImpl>, Experts {
  WiderExpertsImpl(int64_t num_experts, int64_t d_model) : Experts(num_experts, d_model, d_model) {}
  void reset() override {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    return zeros(x.size(0), x.size(1) + 1);
  }
};
TORCH_MODULE(WiderExperts);

// The name of a call is the same call in Python, which export.py evaluates.
const std::map<std::string, Call> calls = {
    {"SoftmaxGate(0, 6)", [] { SoftmaxGate(0, 6); }},
    {"TopKGate(8, 6, 7)", [] { TopKGate(8, 6, 7); }},
    {"TopKGate(8, 6, 2, score='relu')", [] { TopKGate(TopKGateOptions(8, 6, 2).score("relu")); }},
    {"TopKGate(8, 6, 2, scale=-0.5)", [] { TopKGate(TopKGateOptions(8, 6, 2).scale(-0.5)); }},
    {"TopKGate(8, 6, 2, num_groups=4)", [] { TopKGate(TopKGateOptions(8, 6, 2).num_groups(4)); }},
    {"TopKGate(8, 6, 2, groups_per_token=2)",
     [] { TopKGate(TopKGateOptions(8, 6, 2).groups_per_token(2)); }},
    {"TopKGate(8, 6, 2, num_groups=3, group_score_k=3)",
     [] { TopKGate(TopKGateOptions(8, 6, 2).num_groups(3).group_score_k(3)); }},
    {"TopKGate(8, 6, 2, bias_update_rate=-0.5)",
     [] { TopKGate(TopKGateOptions(8, 6, 2).bias_update_rate(-0.5)); }},
    {"NoisyTopKGate(0, 6, 2)", [] { NoisyTopKGate(NoisyTopKGateOptions(0, 6, 2)); }},
    {"NoisyTopKGate(8, 6, 2, noise_epsilon=-0.5)",
     [] { NoisyTopKGate(NoisyTopKGateOptions(8, 6, 2).noise_epsilon(-0.5)); }},
    {"HierarchicalNoisyTopKGate(8, 4, 3, (5, 1))",
     [] { HierarchicalNoisyTopKGate(HierarchicalNoisyTopKGateOptions(8, 4, 3, pair(5, 1))); }},
    {"BalancedGate(8, 6, 7)", [] { BalancedGate(BalancedGateOptions(8, 6, 7)); }},
    {"ExpertChoiceGate(8, 6, 7)", [] { ExpertChoiceGate(8, 6, 7); }},
    {"HierarchicalBalancedGate(8, 4, 3, (2, 4))",
     [] { HierarchicalBalancedGate(HierarchicalBalancedGateOptions(8, 4, 3, pair(2, 4))); }},
    {"FeedForwardExperts(4, 0)", [] { FeedForwardExperts(FeedForwardExpertsOptions(4, 0)); }},
    {"FeedForwardExperts(4, 8, d_output=0)",
     [] { FeedForwardExperts(FeedForwardExpertsOptions(4, 8).d_output(0)); }},
    {"FeedForwardExperts(4, 8, [5, 0])",
     [] {
       FeedForwardExperts(FeedForwardExpertsOptions(4, 8).hidden_sizes({5, 0}));
     }},
    {"FeedForwardExperts(4, 8, activation='clamped_swiglu', activation_args=(-1.5, 0.5, 0.25))",
     [] {
       const auto options = FeedForwardExpertsOptions(4, 8).activation("clamped_swiglu");
       FeedForwardExperts(FeedForwardExpertsOptions(options).activation_args({-1.5, 0.5, 0.25}));
     }},
    {"SharedExpert(8, [5, 0])",
     [] {
       SharedExpert(SharedExpertOptions(8, {5, 0}));
     }},
    {"MoE(0, 6, 2)", [] { MoE(MoEOptions(0, 6, 2)); }},
    {"MoE(8, 6, 2, w_importance=-0.5)", [] { MoE(MoEOptions(8, 6, 2).w_importance(-0.5)); }},
    {"MoE(8, 6, 2, w_load=-0.25)", [] { MoE(MoEOptions(8, 6, 2).w_load(-0.25)); }},
    {"MoE(8, 6, 2, gate=TopKGate(8, 6, 2), noise_epsilon=0.5)",
     [] { MoE(MoEOptions(8, 6, 2).gate(TopKGate(8, 6, 2).ptr()).noise_epsilon(0.5)); }},
    {"MoE(8, 6, 2, gate=TopKGate(8, 6, 2), noise_epsilon=1e-2)",
     [] { MoE(MoEOptions(8, 6, 2).gate(TopKGate(8, 6, 2).ptr()).noise_epsilon(1e-2)); }},
    {"MoE(8, 6, 2, experts=FeedForwardExperts(6, 8), activation='tanh')",
     [] {
       FeedForwardExperts experts(FeedForwardExpertsOptions(6, 8));
       MoE(MoEOptions(8, 6, 2).experts(experts.ptr()).activation("tanh"));
     }},
    {"MoE(8, 6, 2, losses=[ZLoss(0.1), ZLoss(0.2)])",
     [] {
       MoE(MoEOptions(8, 6, 2).losses(
           {std::make_shared<ZLoss>(0.1), std::make_shared<ZLoss>(0.2)}));
     }},
    {"HierarchicalMoE(8, 2, 3, (1, 1), losses=[ZLoss(0.1)])(zeros(3, 8))",
     [] { without_logits(std::make_shared<ZLoss>(0.1)); }},
    {"MoE(8, 6, 2, shared_expert=nn.Linear(8, 9))(zeros(3, 8))",
     [] {
       MoE layer(MoEOptions(8, 6, 2).shared_expert(torch::nn::Linear(8, 9)));
       layer->forward(zeros(3, 8));
     }},
    {"MoE(8, 2, 2, gate=SoftmaxGate(8, 2))(zeros(3, 8), expert_index=tensor([[0, 1]] * 3))",
     [] {
       MoE layer(MoEOptions(8, 2, 2).gate(SoftmaxGate(8, 2)));
       layer->forward(zeros(3, 8), {}, torch::tensor({{0, 1}, {0, 1}, {0, 1}}));
     }},
    {"replay(zeros(3, 2))", [] { replay(zeros(3, 2)); }},
    {"replay(zeros(3, 1, dtype=int64))", [] { replay(zeros(3, 1).to(torch::kLong)); }},
    {"replay(tensor([[0, 1]] * 4))",
     [] {
       replay(torch::tensor({{0, 1}, {0, 1}, {0, 1}, {0, 1}}));
     }},
    {"replay(tensor([[0, 1], [0, 6], [0, 1]]))",
     [] {
       replay(torch::tensor({{0, 1}, {0, 6}, {0, 1}}));
     }},
    {"replay(tensor([[0, 1], [3, 3], [0, 1]]))",
     [] {
       replay(torch::tensor({{0, 1}, {3, 3}, {0, 1}}));
     }},
    {"MoE(8, 6, 2, gate=TopKGate(9, 6, 2))",
     [] { MoE(MoEOptions(8, 6, 2).gate(TopKGate(9, 6, 2).ptr())); }},
    {"MoE(8, 6, 2, gate=TopKGate(8, 7, 2))",
     [] { MoE(MoEOptions(8, 6, 2).gate(TopKGate(8, 7, 2).ptr())); }},
    {"MoE(8, 6, 2, gate=TopKGate(8, 6, 3))",
     [] { MoE(MoEOptions(8, 6, 2).gate(TopKGate(8, 6, 3).ptr())); }},
    {"MoE(8, 6, 2, experts=FeedForwardExperts(6, 9))",
     [] {
       FeedForwardExperts experts(FeedForwardExpertsOptions(6, 9));
       MoE(MoEOptions(8, 6, 2).experts(experts.ptr()));
     }},
    {"MoE(8, 6, 2)(zeros(3, 7))", [] { MoE(MoEOptions(8, 6, 2))->forward(zeros(3, 7)); }},
    {"MoE(8, 6, 2)(zeros(3, 8, dtype=int64))",
     [] { MoE(MoEOptions(8, 6, 2))->forward(zeros(3, 8).to(torch::kLong)); }},
    {"MoE(8, 6, 2)(zeros(3, 8), ones(4, dtype=bool))",
     [] { MoE(MoEOptions(8, 6, 2))->forward(zeros(3, 8), torch::ones({4}, torch::kBool)); }},
    {"MoE(8, 6, 2)(zeros(3, 8), ones(3))",
     [] { MoE(MoEOptions(8, 6, 2))->forward(zeros(3, 8), torch::ones({3})); }},
    {"SwitchLoss(-0.5)", [] { SwitchLoss(-0.5); }},
    {"importance_loss(zeros(3), -0.5)", [] { importance_loss(zeros(3), -0.5); }},
    {"cv_squared(zeros(0))", [] { cv_squared(zeros(0)); }},
    {"batchwise_loss(zeros(4, 3), zeros(2), zeros(4, 3, dtype=bool))",
     [] { batchwise_loss(zeros(4, 3), zeros(2), zeros(4, 3).to(torch::kBool)); }},
    {"batchwise_loss(zeros(4, 3), zeros(3), zeros(3, 4, dtype=bool))",
     [] { batchwise_loss(zeros(4, 3), zeros(3), zeros(3, 4).to(torch::kBool)); }},
    {"FactoredAdam([zeros(2, 3)], lr=-0.5)", [] { optimize(FactoredAdamOptions(-0.5)); }},
    {"FactoredAdam([zeros(2, 3)], beta2=1.5)", [] { optimize(FactoredAdamOptions().beta2(1.5)); }},
    {"FactoredAdam([zeros(2, 3, dtype=complex64)])",
     [] { optimize(FactoredAdamOptions(), torch::kComplexFloat); }},
    {"SoftmaxGate(8, 6)(zeros(3, 7))", [] { SoftmaxGate(8, 6)->forward(zeros(3, 7)); }},
    {"TopKGate(8, 6, 2)(zeros(3, 7))", [] { TopKGate(8, 6, 2)->forward(zeros(3, 7)); }},
    {"NoisyTopKGate(8, 6, 2)(zeros(3, 7))",
     [] { NoisyTopKGate(NoisyTopKGateOptions(8, 6, 2))->forward(zeros(3, 7)); }},
    {"HierarchicalNoisyTopKGate(8, 4, 3, (2, 1))(zeros(3, 7))",
     [] {
       HierarchicalNoisyTopKGate(HierarchicalNoisyTopKGateOptions(8, 4, 3, pair(2, 1)))
           ->forward(zeros(3, 7));
     }},
    {"BalancedGate(8, 6, 2)(zeros(3, 7))",
     [] { BalancedGate(BalancedGateOptions(8, 6, 2))->forward(zeros(3, 7)); }},
    {"HierarchicalBalancedGate(8, 4, 3, (2, 1))(zeros(3, 7))",
     [] {
       HierarchicalBalancedGate(HierarchicalBalancedGateOptions(8, 4, 3, pair(2, 1)))
           ->forward(zeros(3, 7));
     }},
    {"ExpertChoiceGate(8, 6, 2)(zeros(3, 7))",
     [] { ExpertChoiceGate(8, 6, 2)->forward(zeros(3, 7)); }},
    {"SharedExpert(8, [5])(zeros(3, 7))",
     [] { SharedExpert(SharedExpertOptions(8, {5}))->forward(zeros(3, 7)); }},
    {"SoftmaxGate(8, 6)(zeros(2, 3, 8))", [] { SoftmaxGate(8, 6)->forward(zeros(2, 3, 8)); }},
    {"SoftmaxGate(8, 6)(zeros(3, 8, dtype=int64))",
     [] { SoftmaxGate(8, 6)->forward(zeros(3, 8).to(torch::kLong)); }},
    {"SoftmaxGate(8, 6)(zeros(3, 8, dtype=complex64))",
     [] { SoftmaxGate(8, 6)->forward(zeros(3, 8).to(torch::kComplexFloat)); }},
    {"TopKGate(8, 6, 2)(zeros(3, 8), expert_index=zeros(3, 2))",
     [] { TopKGate(8, 6, 2)->replay(zeros(3, 8), zeros(3, 2)); }},
    {"TopKGate(8, 6, 2)(zeros(3, 8), expert_index=zeros(3, 1, dtype=int64))",
     [] { TopKGate(8, 6, 2)->replay(zeros(3, 8), zeros(3, 1).to(torch::kLong)); }},
    {"TopKGate(8, 6, 2)(zeros(1, 8), expert_index=tensor([[0, 6]]))",
     [] {
       TopKGate(8, 6, 2)->replay(zeros(1, 8), torch::tensor({{0, 6}}));
     }},
    {"TopKGate(8, 6, 2)(zeros(1, 8), expert_index=tensor([[3, 3]]))",
     [] {
       TopKGate(8, 6, 2)->replay(zeros(1, 8), torch::tensor({{3, 3}}));
     }},
    {"NoisyTopKGate(8, 6, 2)(zeros(3, 8), expert_index=zeros(3, 2))",
     [] { NoisyTopKGate(NoisyTopKGateOptions(8, 6, 2))->replay(zeros(3, 8), zeros(3, 2)); }},
    {"NoisyTopKGate(8, 6, 2)(zeros(3, 8), expert_index=zeros(3, 1, dtype=int64))",
     [] {
       NoisyTopKGate(NoisyTopKGateOptions(8, 6, 2))
           ->replay(zeros(3, 8), zeros(3, 1).to(torch::kLong));
     }},
    {"NoisyTopKGate(8, 6, 2)(zeros(1, 8), expert_index=tensor([[0, 6]]))",
     [] {
       NoisyTopKGate(NoisyTopKGateOptions(8, 6, 2))->replay(zeros(1, 8), torch::tensor({{0, 6}}));
     }},
    {"NoisyTopKGate(8, 6, 2)(zeros(1, 8), expert_index=tensor([[3, 3]]))",
     [] {
       NoisyTopKGate(NoisyTopKGateOptions(8, 6, 2))->replay(zeros(1, 8), torch::tensor({{3, 3}}));
     }},
    {"TopKGate(8, 6, 2, bias_update_rate=inf)",
     [] { TopKGate(TopKGateOptions(8, 6, 2).bias_update_rate(inf)); }},
    {"TopKGate(8, 6, 2, scale=1e300)", [] { TopKGate(TopKGateOptions(8, 6, 2).scale(1e300)); }},
    {"TopKGate(8, 6, 2, num_groups=0)", [] { TopKGate(TopKGateOptions(8, 6, 2).num_groups(0)); }},
    {"TopKGate(8, 6, 2, groups_per_token=0)",
     [] { TopKGate(TopKGateOptions(8, 6, 2).groups_per_token(0)); }},
    {"TopKGate(8, 6, 2, group_score_k=0)",
     [] { TopKGate(TopKGateOptions(8, 6, 2).group_score_k(0)); }},
    {"MoE(8, 6, 2, w_importance=inf)", [] { MoE(MoEOptions(8, 6, 2).w_importance(inf)); }},
    {"MoE(8, 6, 2, w_load=1e-50)", [] { MoE(MoEOptions(8, 6, 2).w_load(1e-50)); }},
    {"MoE(8, 6, 2, noise_epsilon=nan)",
     [] { MoE(MoEOptions(8, 6, 2).noise_epsilon(std::nan(""))); }},
    {"SwitchLoss(1e+300)", [] { SwitchLoss(1e300); }},
    {"importance_loss(ones(3), inf)", [] { importance_loss(torch::ones({3}), inf); }},
    {"importance_loss(ones(3, dtype=int64), 0.5)",
     [] { importance_loss(torch::ones({3}, torch::kLong), 0.5); }},
    {"load_loss(zeros(3, 3), 0.5)", [] { load_loss(zeros(3, 3), 0.5); }},
    {"batchwise_loss(zeros(4, 3), zeros(3), zeros(4, 3))",
     [] { batchwise_loss(zeros(4, 3), zeros(3), zeros(4, 3)); }},
    {"batchwise_loss(zeros(3), zeros(3), zeros(3, dtype=bool))",
     [] { batchwise_loss(zeros(3), zeros(3), zeros(3).to(torch::kBool)); }},
    {"FeedForwardExperts(4, 8, dtype=int64)",
     [] { FeedForwardExperts(FeedForwardExpertsOptions(4, 8).dtype(torch::kLong)); }},
    {"SharedExpert(8, [5], dtype=int64)",
     [] { SharedExpert(SharedExpertOptions(8, {5}).dtype(torch::kLong)); }},
    {"MoE(8, 6, 2, expert_dtype=complex64)",
     [] { MoE(MoEOptions(8, 6, 2).expert_dtype(torch::kComplexFloat)); }},
    {"MoE(8, 6, 2)(zeros(3, 8, dtype=float64))",
     [] { MoE(MoEOptions(8, 6, 2))->forward(zeros(3, 8).to(torch::kDouble)); }},
    {"MoE(8, 6, 2, shared_expert=SharedExpert(9, [5]))",
     [] { MoE(MoEOptions(8, 6, 2).shared_expert(SharedExpert(SharedExpertOptions(9, {5})))); }},
    {"MoE(8, 6, 2, shared_expert=Sum())(zeros(3, 8))",
     [] { MoE(MoEOptions(8, 6, 2).shared_expert(Sum()))->forward(zeros(3, 8)); }},
    {"MoE(8, 6, 2, experts=WiderExperts(6, 8))(zeros(3, 8))",
     [] { MoE(MoEOptions(8, 6, 2).experts(WiderExperts(6, 8)))->forward(zeros(3, 8)); }},
    {"FactoredAdam([zeros(2, 3)], lr=nan)", [] { optimize(FactoredAdamOptions(std::nan(""))); }},
    {"FactoredAdam([zeros(2, 3)], eps=inf)", [] { optimize(FactoredAdamOptions().eps(inf)); }},
    {"FactoredAdam([zeros(2, 3)], eps=0)", [] { optimize(FactoredAdamOptions().eps(0)); }},
    {"step_with(eye(3).to_sparse())",
     [] {
       auto weight = torch::zeros({3, 3}, torch::requires_grad());
       weight.mutable_grad() = torch::eye(3).to_sparse();
       FactoredAdam({weight}).step();
     }},
};

std::map<std::string, Tree> python_errors() { return Tree::file("module_errors").branches(); }

class Errors : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(, Errors, testing::ValuesIn(names_of(calls)), test_name);

TEST_P(Errors, HaveThePythonText) {
  static const auto expected = python_errors();
  expect_error(expected.at(GetParam()), calls.at(GetParam()));
}

// What Python has no call for

template <typename Error>
void expect_message(const std::string& message, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "no error: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(error.what_without_backtrace(), message);
  }
}

TEST(Weights, ThatChangeAreCheckedInForward) {
  const auto loss = std::make_shared<ZLoss>(0.1);
  MoE layer(MoEOptions(8, 6, 2).losses({loss}));
  const auto forward = [&] { layer->forward(zeros(3, 8)); };
  loss->weight = std::nan("");
  expect_message<c10::ValueError>("ZLoss: weight must be a finite number, got nan", forward);
  loss->weight = 0.1;
  layer->options.w_load(-1);
  expect_message<c10::ValueError>("MoE: w_load must be at least 0, got -1", forward);
  layer->options.w_load(1);
  forward();
}

TEST(Sizes, WhoseProductOverflowsAreNamed) {
  constexpr int64_t large = int64_t{1} << 62, root = int64_t{1} << 32;
  const std::string most = " must be at most 9223372036854775807, got ";
  const std::string product = most + "4294967296 * 4294967296";
  expect_message<c10::ValueError>("HierarchicalMoE: num_groups * experts_per_group" + product, [] {
    HierarchicalMoE(HierarchicalMoEOptions(8, root, root, pair(1, 1)));
  });
  expect_message<c10::ValueError>(
      "HierarchicalNoisyTopKGate: num_groups * experts_per_group" + product, [] {
        HierarchicalNoisyTopKGate(HierarchicalNoisyTopKGateOptions(8, root, root, pair(1, 1)));
      });
  expect_message<c10::ValueError>(
      "FeedForwardExperts: the width of a gated hidden layer" + most + "2 * 4611686018427387904",
      [] {
        const auto options = FeedForwardExpertsOptions(4, 8).activation("swiglu");
        FeedForwardExperts(FeedForwardExpertsOptions(options).hidden_sizes({large}));
      });
}

TEST(Modules, ThatAreMadeStayAsTheyAreIfResetFails) {
  MoE layer(MoEOptions(8, 6, 2).expert_dtype(torch::kBFloat16).bias(true));
  layer->eval();
  const auto x = torch::randn({3, 8});
  const auto y = std::get<0>(layer->forward(x));
  EXPECT_THROW(layer->reset(), c10::Error);
  EXPECT_THROW(dynamic_cast<FeedForwardExpertsImpl&>(layer->experts()).reset(), c10::Error);
  EXPECT_THROW(dynamic_cast<NoisyTopKGateImpl&>(layer->gate()).reset(), c10::Error);
  EXPECT_TRUE(same_bits(std::get<0>(layer->forward(x)), y));
  EXPECT_EQ(layer->named_children()["gate"].get(),
            dynamic_cast<torch::nn::Module*>(&layer->gate()));
}

struct FewerExpertsImpl : torch::nn::Cloneable<FewerExpertsImpl>, Gate {
  FewerExpertsImpl() : Gate(8, 6, 2) {}
  void reset() override {}
  Routing forward(const Tensor& x) override { return TopKGate(8, 5, 2)->forward(x); }
};
TORCH_MODULE(FewerExperts);

TEST(Gates, MustRouteToAllExpertsOfTheLayer) {
  MoE layer(MoEOptions(8, 6, 2).gate(FewerExperts()));
  expect_message<c10::ValueError>("MoE: num_experts must be 5, the gate's number of experts, got 6",
                                  [&] { layer->forward(zeros(3, 8)); });
}

TEST(Gates, WithoutBiasUpdateRateHaveNoUpdate) {
  expect_message<c10::ValueError>("TopKGate: bias_update_rate must be set for update(), got None",
                                  [] { TopKGate(8, 6, 2)->update(); });
}

TEST(Gates, WithoutSelectionBiasCannotBeUpdated) {
  TopKGate gate(8, 6, 2);
  try {
    update_gates(*gate);
    ADD_FAILURE() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_STREQ(error.what_without_backtrace(),
                 "update_gates: module must contain a TopKGate with bias_update_rate, got "
                 "'TopKGate'");
  }
}

TEST(Losses, MustNotBeNull) {
  EXPECT_THROW(MoE(MoEOptions(8, 6, 2).losses({nullptr})), c10::ValueError);
}

// What Python's type checks refuse

TEST(Layer, TakesUndefinedTensorsAsAbsent) {
  MoE layer(MoEOptions(8, 6, 2));
  layer->eval();
  const auto x = torch::ones({3, 8});
  const auto expected = std::get<0>(layer(x));
  EXPECT_TRUE(same_bits(std::get<0>(layer(x, torch::Tensor(), torch::Tensor())), expected));
  EXPECT_THROW(layer(torch::Tensor()), c10::TypeError);
}

TEST(Gates, NeedDefinedTensors) {
  const auto x = zeros(3, 8);
  expect_message<c10::TypeError>("SoftmaxGate: x must be a tensor, got an undefined one",
                                 [] { SoftmaxGate(8, 6)->forward(Tensor()); });
  for (const std::shared_ptr<Gate>& gate : std::vector<std::shared_ptr<Gate>>{
           TopKGate(8, 6, 2).ptr(), NoisyTopKGate(NoisyTopKGateOptions(8, 6, 2)).ptr(),
           SoftmaxGate(8, 6).ptr()}) {
    EXPECT_THROW(gate->replay(x, Tensor()), c10::TypeError);
  }
}

TEST(Losses, NeedDefinedTensors) {
  EXPECT_THROW(importance_loss(Tensor(), 0.5), c10::TypeError);
  EXPECT_THROW(batchwise_loss(zeros(4, 3), zeros(3), Tensor()), c10::TypeError);
}

TEST(Arguments, ThatAreUndefinedAreAbsent) {
  const auto x = torch::rand({5, 4});
  const auto expected = ops::noisy_topk_gating(x, {}, {}, 2);
  EXPECT_TRUE(same_bits(ops::noisy_topk_gating(x, Tensor(), Tensor(), 2).gates, expected.gates));
  const auto weight = torch::rand({1, 4, 3});
  const auto y = ops::experts(x, {weight}, {}, "relu", {});
  EXPECT_TRUE(same_bits(ops::experts(x, {weight}, {}, "relu", {.gates = Tensor()}), y));
}

TEST(Arguments, ThatMustBeDefinedAreNamed) {
  const auto x = torch::rand({5, 4});
  const auto index = torch::zeros({5, 2}, torch::kLong);
  const std::vector<std::pair<std::string, Call>> calls = {
      {"topk_routing: logits must be a tensor", [&] { ops::topk_routing(Tensor(), 2); }},
      {"load: noise_stddev must be a tensor", [&] { ops::load(x, Tensor(), x, index); }},
      {"dispatch_plan: expert_index must be a tensor", [&] { ops::dispatch_plan(Tensor(), 4); }},
      {"experts: weights must have only tensors",
       [&] { ops::experts(x, {Tensor()}, {}, "relu", {}); }},
      {"linear_cross_entropy: target must be a tensor",
       [&] { ops::linear_cross_entropy(x, x, Tensor(), {}); }},
      {"lstm: weight_input must be a tensor",
       [&] {
         ops::lstm(torch::rand({3, 5, 4}), Tensor(), x, {}, {}, {}, {}, {}, false);
       }},
  };
  for (const auto& [message, call] : calls) {
    try {
      call();
      ADD_FAILURE() << "no error: " << message;
    } catch (const c10::TypeError& error) {
      EXPECT_EQ(error.what_without_backtrace(), message + ", got an undefined one");
    }
  }
}

TEST(Children, MustBeGateAndExperts) {
  const auto linear = torch::nn::Linear(8, 6).ptr();
  EXPECT_THROW(MoE(MoEOptions(8, 6, 2).gate(linear)), c10::TypeError);
  EXPECT_THROW(MoE(MoEOptions(8, 6, 2).experts(linear)), c10::TypeError);
}

// Files

class Files : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(exported::folder) / "errors";
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directory(folder_);
  }
  std::string path(const std::string& name) const { return folder_ / name; }
  std::filesystem::path folder_;
};

TEST_F(Files, ThatCannotBeReadAreNamed) {
  std::ofstream(path("text")) << "no state dict";
  std::ofstream(path("empty"));
  // LibTorch throws std::bad_alloc for the last one.
  std::filesystem::copy(exported::folder + "/corrupted.pt", path("corrupted"));
  for (const auto name : {"missing", "text", "empty", "corrupted"}) {
    try {
      moe_ext::read_state_dict(path(name));
      ADD_FAILURE() << "no error for " << name;
    } catch (const c10::TypeError& error) {
      const std::string message = error.what_without_backtrace();
      const auto beginning = "read_state_dict: " + path(name) +
                             " must be a file of torch.save(dict(module.state_dict()), path), got ";
      EXPECT_EQ(message.rfind(beginning, 0), 0) << message;
    }
  }
}

TEST_F(Files, OfAnOrderedDictAreExplained) {
  try {
    moe_ext::read_state_dict(exported::folder + "/ordered.pt");
    ADD_FAILURE() << "no error";
  } catch (const c10::TypeError& error) {
    const std::string message = error.what_without_backtrace();
    const std::string end = "got an OrderedDict; write dict(module.state_dict())";
    ASSERT_GE(message.size(), end.size());
    EXPECT_EQ(message.substr(message.size() - end.size()), end);
  }
}

TEST_F(Files, WithOtherValuesAreRefused) {
  const std::vector<char> bytes = torch::pickle_save(c10::IValue(std::vector<int64_t>{1, 2}));
  std::ofstream(path("list"), std::ios::binary).write(bytes.data(), bytes.size());
  EXPECT_THROW(moe_ext::read_state_dict(path("list")), c10::TypeError);
}

// The pickler writes a storage once, with the dtype of its first tensor.
TEST_F(Files, KeepTheDtypesOfTensorsThatShareStorage) {
  const auto weight = torch::randn({4, 6}), numbers = torch::randn({3}, torch::kComplexFloat);
  const moe_ext::StateDict values = {{"bits", weight.view(torch::kInt)},
                                     {"half", weight.view(torch::kHalf)},
                                     {"numbers", numbers},
                                     {"parts", torch::view_as_real(numbers)},
                                     {"rows", weight.slice(0, 1, 3)},
                                     {"weight", weight}};
  moe_ext::write_state_dict(values, path("state"));
  expect_same_bits(moe_ext::read_state_dict(path("state")), values);
}

TEST_F(Files, TakeDenseTensors) {
  const auto x = torch::ones({3});
  const std::string rule = "write_state_dict: w must be a dense tensor with values, got ";
  const std::vector<std::pair<std::string, Tensor>> wrong = {
      {"an undefined one", Tensor()},
      {"the layout Sparse", x.to_sparse()},
      {"one on the meta device", x.to(torch::kMeta)}};
  for (const auto& [found, value] : wrong) {
    const moe_ext::StateDict values = {{"v", x}, {"w", value}};
    expect_message<c10::TypeError>(rule + found,
                                   [&] { moe_ext::write_state_dict(values, path("state")); });
  }
  EXPECT_FALSE(std::filesystem::exists(path("state")));
}

TEST_F(Files, KeepLinksPipesAndPermissions) {
  namespace fs = std::filesystem;
  const moe_ext::StateDict values = {{"w", torch::ones({3})}};
  const auto permissions = [](const std::string& file) { return fs::status(file).permissions(); };
  // A link to a file that does not exist yet, and a link to this link.
  fs::create_directory(path("disk"));
  fs::create_symlink("disk/state", path("link"));
  fs::create_symlink("link", path("latest"));
  const mode_t before = umask(027);
  moe_ext::write_state_dict(values, path("latest"));
  umask(before);
  EXPECT_EQ(permissions(path("disk/state")), fs::perms(0640));
  fs::permissions(path("disk/state"), fs::perms(0604));
  moe_ext::write_state_dict(values, path("latest"));
  EXPECT_EQ(permissions(path("disk/state")), fs::perms(0604));
  EXPECT_TRUE(fs::is_symlink(path("latest")) && fs::is_symlink(path("link")));
  expect_same_bits(moe_ext::read_state_dict(path("disk/state")), values);

  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  const int reader = open(path("pipe").c_str(), O_RDONLY | O_NONBLOCK);
  moe_ext::write_state_dict(values, path("pipe"));
  char beginning[2] = {};
  EXPECT_EQ(read(reader, beginning, 2), 2);
  EXPECT_EQ(std::string(beginning, 2), "PK");  // of a zip file
  close(reader);
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
  fs::create_symlink("/dev/full", path("full"));
  EXPECT_THROW(moe_ext::write_state_dict(values, path("full")), c10::Error);
  EXPECT_TRUE(fs::is_character_file(path("full")));
  fs::create_symlink("loop", path("loop"));
  EXPECT_THROW(moe_ext::write_state_dict(values, path("loop")), c10::Error);
}

TEST_F(Files, AreReplacedOnlyWhenComplete) {
  const moe_ext::StateDict first = {{"w", torch::ones({3})}}, second = {{"w", torch::zeros({2})}};
  moe_ext::write_state_dict(first, path("state"));
  std::filesystem::create_hard_link(path("state"), path("old"));  // shows a write in place
  moe_ext::write_state_dict(second, path("state"));
  expect_same_bits(moe_ext::read_state_dict(path("state")), second);
  expect_same_bits(moe_ext::read_state_dict(path("old")), first);
  EXPECT_THROW(moe_ext::write_state_dict(first, path("no/such/folder")), c10::Error);
  // No temporary file stays.
  const std::filesystem::directory_iterator files(folder_);
  EXPECT_EQ(std::distance(begin(files), end(files)), 2);
}

}  // namespace
