// Modules, losses and the optimizer throw errors with the class and the text of Python.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <moe_ext/nn.h>
#include <moe_ext/optim.h>
#include <moe_ext/state_dict.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

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

// The calls of MODULE_ERRORS in export.py.
const std::map<std::string, Call> calls = {
    {"SoftmaxGate d_model", [] { SoftmaxGate(0, 6); }},
    {"SoftmaxGate num_experts", [] { SoftmaxGate(8, -1); }},
    {"TopKGate k=0", [] { TopKGate(8, 6, 0); }},
    {"TopKGate k=7", [] { TopKGate(8, 6, 7); }},
    {"TopKGate score", [] { TopKGate(TopKGateOptions(8, 6, 2).score("relu")); }},
    {"TopKGate scale", [] { TopKGate(TopKGateOptions(8, 6, 2).scale(-0.5)); }},
    {"TopKGate num_groups", [] { TopKGate(TopKGateOptions(8, 6, 2).num_groups(4)); }},
    {"TopKGate groups_per_token", [] { TopKGate(TopKGateOptions(8, 6, 2).groups_per_token(2)); }},
    {"TopKGate groups_per_token too small",
     [] { TopKGate(TopKGateOptions(8, 6, 3).num_groups(3)); }},
    {"TopKGate group_score_k",
     [] { TopKGate(TopKGateOptions(8, 6, 2).num_groups(3).group_score_k(3)); }},
    {"TopKGate bias_update_rate",
     [] { TopKGate(TopKGateOptions(8, 6, 2).bias_update_rate(-0.5)); }},
    {"NoisyTopKGate d_model", [] { NoisyTopKGate(NoisyTopKGateOptions(0, 6, 2)); }},
    {"NoisyTopKGate k", [] { NoisyTopKGate(NoisyTopKGateOptions(8, 6, 7)); }},
    {"NoisyTopKGate noise_epsilon",
     [] { NoisyTopKGate(NoisyTopKGateOptions(8, 6, 2).noise_epsilon(-0.5)); }},
    {"HierarchicalNoisyTopKGate num_groups",
     [] { HierarchicalNoisyTopKGate(HierarchicalNoisyTopKGateOptions(8, 0, 3, pair(1, 1))); }},
    {"HierarchicalNoisyTopKGate k1",
     [] { HierarchicalNoisyTopKGate(HierarchicalNoisyTopKGateOptions(8, 4, 3, pair(5, 1))); }},
    {"HierarchicalNoisyTopKGate k2",
     [] { HierarchicalNoisyTopKGate(HierarchicalNoisyTopKGateOptions(8, 4, 3, pair(1, 0))); }},
    {"BalancedGate num_experts", [] { BalancedGate(BalancedGateOptions(8, 0, 1)); }},
    {"BalancedGate k", [] { BalancedGate(BalancedGateOptions(8, 6, 7)); }},
    {"ExpertChoiceGate num_experts", [] { ExpertChoiceGate(8, 0, 1); }},
    {"ExpertChoiceGate k", [] { ExpertChoiceGate(8, 6, 7); }},
    {"HierarchicalBalancedGate k2",
     [] { HierarchicalBalancedGate(HierarchicalBalancedGateOptions(8, 4, 3, pair(2, 4))); }},
    {"HierarchicalBalancedGate experts_per_group",
     [] { HierarchicalBalancedGate(HierarchicalBalancedGateOptions(8, 4, -3, pair(2, 1))); }},
    {"FeedForwardExperts num_experts",
     [] { FeedForwardExperts(FeedForwardExpertsOptions(-1, 8)); }},
    {"FeedForwardExperts d_model", [] { FeedForwardExperts(FeedForwardExpertsOptions(4, 0)); }},
    {"FeedForwardExperts d_output",
     [] { FeedForwardExperts(FeedForwardExpertsOptions(4, 8).d_output(0)); }},
    {"FeedForwardExperts hidden_sizes",
     [] {
       FeedForwardExperts(FeedForwardExpertsOptions(4, 8).hidden_sizes({5, 0}));
     }},
    {"FeedForwardExperts activation",
     [] { FeedForwardExperts(FeedForwardExpertsOptions(4, 8).activation("rely")); }},
    {"FeedForwardExperts activation_args",
     [] {
       const auto options = FeedForwardExpertsOptions(4, 8).activation("clamped_swiglu");
       FeedForwardExperts(FeedForwardExpertsOptions(options).activation_args({-1.5, 0.5, 0.25}));
     }},
    {"FeedForwardExperts activation_args missing",
     [] { FeedForwardExperts(FeedForwardExpertsOptions(4, 8).activation("clamped_swiglu")); }},
    {"FeedForwardExperts activation_args left over",
     [] {
       FeedForwardExperts(FeedForwardExpertsOptions(4, 8).activation_args({7.5, 0.5, 0.25}));
     }},
    {"SharedExpert d_model", [] { SharedExpert(SharedExpertOptions(0, {5})); }},
    {"SharedExpert hidden_sizes",
     [] {
       SharedExpert(SharedExpertOptions(8, {5, 0}));
     }},
    {"SharedExpert activation",
     [] { SharedExpert(SharedExpertOptions(8, {5}).activation("rely")); }},
    {"MoE d_model", [] { MoE(MoEOptions(0, 6, 2)); }},
    {"MoE k", [] { MoE(MoEOptions(8, 6, 7)); }},
    {"MoE w_importance", [] { MoE(MoEOptions(8, 6, 2).w_importance(-0.5)); }},
    {"MoE w_load", [] { MoE(MoEOptions(8, 6, 2).w_load(-0.25)); }},
    {"MoE noise_epsilon with gate",
     [] { MoE(MoEOptions(8, 6, 2).gate(TopKGate(8, 6, 2).ptr()).noise_epsilon(0.5)); }},
    {"MoE activation with experts",
     [] {
       FeedForwardExperts experts(FeedForwardExpertsOptions(6, 8));
       MoE(MoEOptions(8, 6, 2).experts(experts.ptr()).activation("tanh"));
     }},
    {"MoE activation_args with experts",
     [] {
       FeedForwardExperts experts(FeedForwardExpertsOptions(6, 8));
       MoE(MoEOptions(8, 6, 2).experts(experts.ptr()).activation_args({7.5, 0.5, 0.25}));
     }},
    {"MoE activation_args",
     [] {
       MoE(MoEOptions(8, 6, 2).activation_args({7.5, 0.5, 0.25}));
     }},
    {"MoE losses",
     [] {
       MoE(MoEOptions(8, 6, 2).losses(
           {std::make_shared<ZLoss>(0.1), std::make_shared<ZLoss>(0.2)}));
     }},
    {"MoE SwitchLoss without logits", [] { without_logits(std::make_shared<SwitchLoss>(0.1)); }},
    {"MoE ZLoss without logits", [] { without_logits(std::make_shared<ZLoss>(0.1)); }},
    {"MoE shared_expert",
     [] {
       MoE layer(MoEOptions(8, 6, 2).shared_expert(torch::nn::Linear(8, 9)));
       layer->forward(zeros(3, 8));
     }},
    {"MoE expert_index of a gate that cannot",
     [] {
       MoE layer(MoEOptions(8, 2, 2).gate(SoftmaxGate(8, 2)));
       layer->forward(zeros(3, 8), {}, torch::tensor({{0, 1}, {0, 1}, {0, 1}}));
     }},
    {"MoE expert_index dtype", [] { replay(zeros(3, 2)); }},
    {"MoE expert_index k", [] { replay(zeros(3, 1).to(torch::kLong)); }},
    {"MoE expert_index tokens",
     [] {
       replay(torch::tensor({{0, 1}, {0, 1}, {0, 1}, {0, 1}}));
     }},
    {"MoE expert_index scalar", [] { replay(torch::tensor(1)); }},
    {"MoE expert_index below 0",
     [] {
       replay(torch::tensor({{0, 1}, {0, 1}, {0, -1}}));
     }},
    {"MoE expert_index too large",
     [] {
       replay(torch::tensor({{0, 1}, {0, 6}, {0, 1}}));
     }},
    {"MoE expert_index twice",
     [] {
       replay(torch::tensor({{0, 1}, {3, 3}, {0, 1}}));
     }},
    {"MoE gate.d_model", [] { MoE(MoEOptions(8, 6, 2).gate(TopKGate(9, 6, 2).ptr())); }},
    {"MoE gate.num_experts", [] { MoE(MoEOptions(8, 6, 2).gate(TopKGate(8, 7, 2).ptr())); }},
    {"MoE gate.k", [] { MoE(MoEOptions(8, 6, 2).gate(TopKGate(8, 6, 3).ptr())); }},
    {"MoE experts.num_experts",
     [] {
       FeedForwardExperts experts(FeedForwardExpertsOptions(5, 8));
       MoE(MoEOptions(8, 6, 2).experts(experts.ptr()));
     }},
    {"MoE experts.d_model",
     [] {
       FeedForwardExperts experts(FeedForwardExpertsOptions(6, 9));
       MoE(MoEOptions(8, 6, 2).experts(experts.ptr()));
     }},
    {"MoE x", [] { MoE(MoEOptions(8, 6, 2))->forward(zeros(3, 7)); }},
    {"MoE x scalar", [] { MoE(MoEOptions(8, 6, 2))->forward(torch::zeros({})); }},
    {"MoE x int64", [] { MoE(MoEOptions(8, 6, 2))->forward(zeros(3, 8).to(torch::kLong)); }},
    {"MoE x bfloat16", [] { MoE(MoEOptions(8, 6, 2))->forward(zeros(3, 8).to(torch::kBFloat16)); }},
    {"MoE mask shape",
     [] { MoE(MoEOptions(8, 6, 2))->forward(zeros(3, 8), torch::ones({4}, torch::kBool)); }},
    {"MoE mask dtype", [] { MoE(MoEOptions(8, 6, 2))->forward(zeros(3, 8), torch::ones({3})); }},
    {"HierarchicalMoE k1", [] { HierarchicalMoE(HierarchicalMoEOptions(8, 4, 3, pair(5, 1))); }},
    {"HierarchicalMoE num_groups",
     [] { HierarchicalMoE(HierarchicalMoEOptions(8, 0, 3, pair(1, 1))); }},
    {"SwitchLoss weight", [] { SwitchLoss(-0.5); }},
    {"ZLoss weight", [] { ZLoss(-0.5); }},
    {"importance_loss weight", [] { importance_loss(zeros(3), -0.5); }},
    {"load_loss weight", [] { load_loss(zeros(3), -0.5); }},
    {"cv_squared empty", [] { cv_squared(zeros(0)); }},
    {"cv_squared shape", [] { cv_squared(zeros(2, 3)); }},
    {"batchwise_loss threshold",
     [] { batchwise_loss(zeros(4, 3), zeros(2), zeros(4, 3).to(torch::kBool)); }},
    {"batchwise_loss mask",
     [] { batchwise_loss(zeros(4, 3), zeros(3), zeros(3, 4).to(torch::kBool)); }},
    {"FactoredAdam lr", [] { optimize(FactoredAdamOptions(-0.5)); }},
    {"FactoredAdam beta2", [] { optimize(FactoredAdamOptions().beta2(1.5)); }},
    {"FactoredAdam eps", [] { optimize(FactoredAdamOptions().eps(-0.5)); }},
    {"FactoredAdam params", [] { optimize(FactoredAdamOptions(), torch::kLong); }},
    {"FactoredAdam sparse",
     [] {
       auto weight = torch::zeros({3, 3}, torch::requires_grad());
       weight.mutable_grad() = torch::eye(3).to_sparse();
       FactoredAdam({weight}).step();
     }},
};

std::map<std::string, Tree> python_errors() { return Tree::file("module_errors").branches(); }

TEST(Table, IsThatOfPython) { EXPECT_EQ(names_of(calls), names_of(python_errors())); }

class Errors : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(, Errors, testing::ValuesIn(names_of(calls)), test_name);

TEST_P(Errors, HaveThePythonText) {
  static const auto expected = python_errors();
  expect_error(expected.at(GetParam()), calls.at(GetParam()));
}

// What Python has no call for

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

TEST(Operators, TakeUndefinedOptionalTensorsAsAbsent) {
  const auto x = torch::rand({5, 4});
  const auto expected = ops::noisy_topk_gating(x, {}, {}, 2);
  EXPECT_TRUE(same_bits(ops::noisy_topk_gating(x, Tensor(), Tensor(), 2).gates, expected.gates));
  const auto weight = torch::rand({1, 4, 3});
  const auto y = ops::experts(x, {weight}, {}, "relu", {});
  EXPECT_TRUE(same_bits(ops::experts(x, {weight}, {}, "relu", {.gates = Tensor()}), y));
}

TEST(Operators, NameTheArgumentThatIsUndefined) {
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
  for (const auto name : {"missing", "text", "empty"}) {
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
