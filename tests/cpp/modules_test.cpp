// Modules: bitwise identical to Python, and weights that go both ways.
#include "modules.h"

#include <gtest/gtest.h>
#include <moe_ext/state_dict.h>

#include <algorithm>
#include <cmath>
#include <sstream>

namespace {

using namespace exported;
using moe_ext::load_state_dict;
using moe_ext::read_state_dict;
using moe_ext::state_dict;
using moe_ext::write_state_dict;

const std::map<std::string, Maker> all = all_modules();

const std::map<std::string, Tree>& cases() {
  static const auto found = Tree::file("modules").branches();
  return found;
}

TEST(Table, IsThatOfPython) { EXPECT_EQ(names_of(all), names_of(cases())); }

// Whether a gate has a selection bias.
bool adapts(const torch::nn::Module& module) {
  const auto names = names_of(state_dict(module));
  return std::any_of(names.begin(), names.end(),
                     [](const auto& name) { return name.ends_with("selection_bias"); });
}

class Modules : public testing::TestWithParam<std::string> {
 protected:
  const Tree& given() const { return cases().at(GetParam()); }
  std::shared_ptr<torch::nn::Module> make() const { return all.at(GetParam())(); }

  // With the weights of the case.
  std::shared_ptr<torch::nn::Module> make_loaded() const {
    const auto module = make();
    load_state_dict(*module, (given() / "weights").tensors());
    return module;
  }
};
INSTANTIATE_TEST_SUITE_P(, Modules, testing::ValuesIn(names_of(all)), test_name);

TEST_P(Modules, StartWithThePythonWeights) {
  torch::manual_seed(7);
  expect_same_bits(state_dict(*make()), (given() / "initial").tensors());
}

TEST_P(Modules, StepsHaveThePythonBits) {
  const auto module = make_loaded();
  const auto steps = (given() / "steps").branches();
  ASSERT_GE(steps.size(), 4);  // a fifth step replays a routing decision
  for (const auto& [number, expected] : steps) {
    SCOPED_TRACE("step " + number);
    module->train(expected.number<bool>("training"));
    torch::manual_seed(expected.number<int64_t>("seed"));
    const auto [results, gradients] =
        step(*module, expected / "inputs", (expected / "upstream").tensors());
    if (adapts(*module)) update_gates(*module);
    expect_same_bits(results, (expected / "results").tensors());
    for (const auto& [name, tensor] : results) {
      EXPECT_EQ(tensor.requires_grad(), (expected / "upstream").find(name).has_value()) << name;
    }
    expect_same_bits(gradients, (expected / "gradients").tensors());
    expect_same_bits(state_dict(*module), (expected / "state").tensors());
  }
}

TEST_P(Modules, CloneIsDeep) {
  const auto module = make_loaded();
  const auto clone = module->clone();
  expect_same_bits(state_dict(*clone), state_dict(*module));
  {
    torch::NoGradGuard guard;
    for (auto& parameter : clone->parameters()) parameter.fill_(5);
    for (auto& buffer : clone->buffers()) buffer.fill_(1);
  }
  expect_same_bits(state_dict(*module), (given() / "weights").tensors());

  // The clone computes with its own parameters.
  const auto expected = given() / "steps" / "2";
  module->eval();
  load_state_dict(*clone, (given() / "weights").tensors());
  clone->eval();
  for (auto& parameter : module->parameters()) parameter.set_requires_grad(false).fill_(5);
  const auto fresh = make_loaded();
  fresh->eval();
  expect_same_bits(call(*clone, expected / "inputs"), call(*fresh, expected / "inputs"));
}

TEST_P(Modules, TorchSavesAndLoadsThem) {
  const auto module = make(), other = make();
  load_state_dict(*module, (given() / "weights").tensors());
  std::stringstream file;
  torch::save(module, file);
  torch::load(other, file);
  expect_same_bits(state_dict(*other), state_dict(*module));
}

TEST_P(Modules, PrintTheirName) {
  std::ostringstream printed;
  printed << *make();
  const auto name = GetParam().substr(0, GetParam().find(' '));
  EXPECT_NE(printed.str().find(name), std::string::npos) << printed.str();
}

TEST_P(Modules, StateDictsThatDoNotFitChangeNothing) {
  const auto module = make();
  const auto before = (given() / "weights").tensors();
  load_state_dict(*module, before);
  auto missing = before, unknown = before, wrong = before;
  for (auto* values : {&missing, &unknown, &wrong}) {
    for (auto& [name, tensor] : *values) tensor = torch::ones_like(tensor);
  }
  missing.erase(std::prev(missing.end()));
  unknown["w_other"] = torch::ones({1});
  wrong.rbegin()->second = torch::ones({1, 2, 3, 4});
  for (const auto& values : {missing, unknown, wrong}) {
    EXPECT_THROW(load_state_dict(*module, values), c10::ValueError);
    expect_same_bits(state_dict(*module), before);
  }
}

class Layers : public Modules {
 protected:
  std::string path(const std::string& writer) const {
    return folder + "/" + GetParam() + "." + writer + ".pt";
  }
  MoEImpl& as_layer(torch::nn::Module& module) const { return dynamic_cast<MoEImpl&>(module); }
};
INSTANTIATE_TEST_SUITE_P(, Layers, testing::ValuesIn(names_of(layers)), test_name);

TEST_P(Layers, ReportThePythonMetrics) {
  const auto module = make_loaded();
  // The thresholds of balanced gates are set in training.
  const auto state = given() / "steps" / "3" / "state";
  load_state_dict(*module, state.tensors());
  module->eval();
  torch::NoGradGuard guard;
  const auto [y, aux] = as_layer(*module).forward(torch::ones({5, D}));
  StateDict actual;
  for (const auto& [name, value] : aux.metrics()) {
    actual[name] = torch::tensor(value, torch::kDouble);
  }
  expect_same_bits(actual, (given() / "metrics").tensors());
}

TEST_P(Layers, ReadPythonStateDicts) {
  const auto values = read_state_dict(path("python"));
  const auto module = make();
  load_state_dict(*module, values);
  expect_same_bits(state_dict(*module), values);
}

// The ctest entry read_back checks in Python what this test writes.
TEST_P(Layers, WriteStateDictsForPython) {
  const auto module = make_loaded();
  torch::manual_seed(1);
  auto& layer = as_layer(*module);
  {
    torch::NoGradGuard guard;
    layer.forward(torch::randn({30, D}));  // sets the thresholds of balanced gates
    layer.eval();
    const auto x = torch::randn({9, D});
    const auto [y, aux] = layer.forward(x);
    write_state_dict(state_dict(layer), path("cpp"));
    write_state_dict({{"x", x}, {"y", y}, {"loss", aux.loss}}, path("result"));
  }
  expect_same_bits(read_state_dict(path("cpp")), state_dict(layer));
}

TEST_P(Layers, NameTheirChildren) {
  const auto module = make();
  auto& layer = as_layer(*module);
  const auto children = layer.named_children();
  std::vector<std::string> names = {"gate", "experts"};
  if (!layer.options.shared_expert().is_empty()) names.push_back("shared_expert");
  ASSERT_EQ(children.keys(), names);
  EXPECT_EQ(dynamic_cast<Gate*>(children["gate"].get()), &layer.gate());
  EXPECT_EQ(dynamic_cast<Experts*>(children["experts"].get()), &layer.experts());
  EXPECT_EQ(layer.gate().d_model(), D);
  EXPECT_EQ(layer.experts().num_experts(), layer.gate().num_experts());
}

// Losses

TEST(Losses, HaveThePythonBits) {
  const auto file = Tree::file("losses");
  const std::map<std::string, std::function<Tensor(const std::vector<Tensor>&)>> losses = {
      {"cv_squared", [](const auto& a) { return cv_squared(a[0]); }},
      {"importance_loss",
       [](const auto& a) { return importance_loss(a[0], a[1].template item<double>()); }},
      {"load_loss", [](const auto& a) { return load_loss(a[0], a[1].template item<double>()); }},
      {"batchwise_loss", [](const auto& a) { return batchwise_loss(a[0], a[1], a[2]); }},
  };
  ASSERT_EQ(names_of(losses), names_of(file.branches()));
  for (const auto& [name, function] : losses) {
    SCOPED_TRACE(name);
    const auto given = file / name;
    auto arguments = given.list("arguments");
    const auto expected = given.list("gradients");
    std::vector<Tensor> leaves(arguments.begin(), arguments.begin() + expected.size());
    for (auto& leaf : leaves) leaf.requires_grad_();
    const auto loss = function(arguments);
    EXPECT_TRUE(same_bits(loss, given["loss"]));
    const auto found = torch::autograd::grad({loss}, leaves);
    for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(same_bits(found[i], expected[i])) << i;
  }
}

// Custom gates and experts

struct RoundRobinGateImpl : torch::nn::Cloneable<RoundRobinGateImpl>, Gate {
  using Gate::Gate;
  void reset() override {}
  Routing forward(const Tensor& x) override {
    auto token = torch::arange(x.size(0), x.options().dtype(torch::kLong)).unsqueeze(1);
    auto index = (token + torch::arange(k(), token.options())) % num_experts();
    return make_routing(torch::full_like(index, 1.0 / k(), torch::kFloat), index);
  }
};
TORCH_MODULE(RoundRobinGate);

// Expert e multiplies its rows by the scale of e.
struct ScalingExpertsImpl : torch::nn::Cloneable<ScalingExpertsImpl>, Experts {
  ScalingExpertsImpl(int64_t num_experts, int64_t d_model)
      : Experts(num_experts, d_model, d_model) {
    reset();
  }
  void reset() override {
    scale = register_parameter("scale", torch::arange(1.0, num_experts() + 1.0));
  }
  Tensor forward(const Tensor& x, const Tensor& offsets) override {
    return x * scale.repeat_interleave(offsets.diff()).unsqueeze(1);
  }
  Tensor scale;
};
TORCH_MODULE(ScalingExperts);

TEST(YourOwn, GateAndExperts) {
  MoE layer(
      MoEOptions(D, 4, 2).gate(RoundRobinGate(D, 4, 2).ptr()).experts(ScalingExperts(4, D).ptr()));
  const auto x = torch::randn({7, D}, torch::requires_grad());
  const auto [y, aux] = layer->forward(x);
  // Token t has the experts t % 4 and (t + 1) % 4, with the gates 1/2.
  const auto t = torch::arange(7);
  const auto first = (t % 4 + 1).to(torch::kFloat), second = ((t + 1) % 4 + 1).to(torch::kFloat);
  const auto factor = ((first + second) / 2).unsqueeze(1);
  EXPECT_TRUE(torch::allclose(y, x * factor, 1e-6));
  y.sum().backward();
  EXPECT_TRUE(torch::allclose(x.grad(), factor.expand_as(x), 1e-6));
  const auto scale = layer->named_parameters()["experts.scale"];
  EXPECT_TRUE(scale.grad().defined());
  EXPECT_TRUE(torch::equal(aux.tokens_per_expert, torch::tensor({3, 4, 4, 3})));
  EXPECT_TRUE(torch::equal(aux.load, aux.tokens_per_expert.to(torch::kFloat)));
  EXPECT_TRUE(torch::equal(aux.importance, aux.load / 2));
}

TEST(YourOwn, GateOfAnEmptyBatch) {
  MoE layer(MoEOptions(D, 4, 2).gate(RoundRobinGate(D, 4, 2).ptr()));
  const auto [y, aux] = layer->forward(torch::randn({0, D}));
  EXPECT_EQ(y.sizes(), (std::vector<int64_t>{0, D}));
  EXPECT_EQ(aux.loss.item<float>(), 0);
}

// Replays noise instead of drawing it.
struct ReplayGateImpl : NoisyTopKGateImpl {
  using NoisyTopKGateImpl::NoisyTopKGateImpl;
  Tensor draw_noise(const Tensor& like) override {
    EXPECT_EQ(like.sizes(), noise.sizes());
    return noise;
  }
  Tensor noise;
};

TEST(YourOwn, NoiseIsReplayed) {
  const NoisyTopKGateOptions options(D, 6, 2);
  const auto gate = std::make_shared<ReplayGateImpl>(options);
  NoisyTopKGateImpl other(options);
  const auto x = torch::randn({20, D});
  torch::manual_seed(4);
  gate->noise = torch::randn({20, 6});
  torch::manual_seed(4);
  const auto drawn = other.forward(x);
  for (int i = 0; i < 2; ++i) {
    const auto replayed = gate->forward(x);
    EXPECT_TRUE(same_bits(replayed.gates, drawn.gates));
    EXPECT_TRUE(same_bits(replayed.expert_index, drawn.expert_index));
    EXPECT_TRUE(same_bits(replayed.load, drawn.load));
  }
  EXPECT_FALSE(torch::equal(other.forward(x).expert_index, drawn.expert_index));
}

struct EntropyLoss : RouterLoss {
  using RouterLoss::RouterLoss;
  std::string name() const override { return "router_entropy"; }
  std::vector<Tensor> sums(const Routing& routing, const Tensor&, const Tensor&) const override {
    const auto p = routing.probabilities();
    return {-torch::special::xlogy(p, p).sum(), torch::full({}, p.size(0), p.options())};
  }
  Tensor value(at::TensorList sums) const override { return sums[0] / sums[1].clamp_min(1); }
};

TEST(YourOwn, Loss) {
  const auto entropy = std::make_shared<EntropyLoss>(0.5);
  MoE layer(MoEOptions(D, 4, 2).losses({entropy, std::make_shared<ZLoss>(0.25)}));
  const auto [y, aux] = layer->forward(torch::randn({7, D}));
  // All logits of an untrained gate are 0.
  const auto h = std::log(4.0);
  EXPECT_NEAR(aux.losses.at("router_entropy").item<double>(), h, 1e-6);
  EXPECT_NEAR(aux.losses.at("z_loss").item<double>(), h * h, 1e-6);
  EXPECT_FALSE(aux.losses.at("z_loss").requires_grad());
  EXPECT_NEAR(aux.loss.item<double>(), 0.5 * h + 0.25 * h * h, 1e-6);
  EXPECT_EQ(aux.metrics().at("router_entropy"), aux.losses.at("router_entropy").item<double>());
  entropy->weight = 0;
  const auto [other, without] = layer->forward(torch::randn({7, D}));
  EXPECT_NEAR(without.loss.item<double>(), 0.25 * h * h, 1e-6);
}

// Replays as the gate of the guide does.
struct SigmoidGateImpl : torch::nn::Cloneable<SigmoidGateImpl>, Gate {
  SigmoidGateImpl(int64_t d_model, int64_t num_experts, int64_t k) : Gate(d_model, num_experts, k) {
    reset();
  }
  void reset() override {
    w_gate = register_parameter("w_gate", torch::randn({d_model(), num_experts()}));
  }
  Routing forward(const Tensor& x) override {
    return replay(x, std::get<1>(x.matmul(w_gate).topk(k())));
  }
  Routing replay(const Tensor& x, const Tensor& expert_index) override {
    const auto scores = x.matmul(w_gate).sigmoid();
    return make_routing(scores.gather(1, expert_index), expert_index);
  }
  Tensor w_gate;
};
TORCH_MODULE(SigmoidGate);

// Routing decisions that are given

TEST(Replay, OfItselfHasTheSameBits) {
  const auto options = TopKGateOptions(D, 6, 2).bias_update_rate(0.1);
  const std::map<std::string, std::shared_ptr<torch::nn::Module>> replaying = {
      {"top k", TopKGate(D, 6, 2).ptr()},
      {"biased", TopKGate(options).ptr()},
      {"softmax", TopKGate(TopKGateOptions(options).renormalize(false)).ptr()},
      {"groups",
       TopKGate(TopKGateOptions(options).score("sigmoid").num_groups(3).groups_per_token(2)).ptr()},
      {"noisy", NoisyTopKGate(NoisyTopKGateOptions(D, 6, 2)).ptr()},
      {"own", SigmoidGate(D, 6, 2).ptr()},
  };
  for (const auto& [name, gate] : replaying) {
    SCOPED_TRACE(name);
    if (auto* top_k = dynamic_cast<TopKGateImpl*>(gate.get())) {
      if (top_k->selection_bias.defined()) top_k->selection_bias.normal_();
    }
    MoE layer(MoEOptions(D, 6, 2).gate(gate));
    const auto x = torch::randn({3, 5, D}), mask = torch::rand({3, 5}) < 0.7;
    torch::manual_seed(5);
    const auto [y, aux] = layer->forward(x, mask);
    torch::manual_seed(5);
    const auto [z, replayed] = layer->forward(x, mask, aux.expert_index);
    EXPECT_TRUE(same_bits(z, y));
    EXPECT_TRUE(same_bits(replayed.gates, aux.gates));
    EXPECT_TRUE(same_bits(replayed.loss, aux.loss));
    const auto all =
        torch::zeros({3, 5, 2}, torch::kInt).index_put({mask}, aux.expert_index.to(torch::kInt));
    const auto other = all.index_put({mask.logical_not()}, torch::tensor(-1, torch::kInt));
    torch::manual_seed(5);
    EXPECT_TRUE(same_bits(std::get<0>(layer->forward(x, mask, other)), y));  // any value at padding
  }
}

// The selection bias

TEST(SelectionBias, IsUpdatedByHand) {
  TopKGate gate(TopKGateOptions(D, 4, 1).bias_update_rate(0.25));
  torch::nn::Sequential model(torch::nn::Linear(D, D));
  model->push_back(MoE(MoEOptions(D, 4, 1).gate(gate)));
  for (const auto& [counts, bias] :
       std::vector<std::pair<std::vector<int64_t>, std::vector<float>>>{
           {{0, 2, 3, 3}, {0.25, 0, -0.25, -0.25}}, {{0, 0, 0, 0}, {0.25, 0, -0.25, -0.25}}}) {
    gate->tokens_since_update.copy_(torch::tensor(counts));
    update_gates(*model);
    EXPECT_TRUE(torch::equal(gate->selection_bias, torch::tensor(bias)));
    EXPECT_EQ(gate->tokens_since_update.count_nonzero().item<int64_t>(), 0);
  }
}

TEST(SelectionBias, CountsTokensInTraining) {
  TopKGate gate(TopKGateOptions(D, 6, 2).bias_update_rate(0.1));
  const auto x = torch::randn({9, D});
  const auto expected = gate->forward(x).load.to(torch::kLong);
  gate->eval();
  gate->forward(x);
  EXPECT_TRUE(torch::equal(gate->tokens_since_update, expected));
  const auto copy = std::dynamic_pointer_cast<TopKGateImpl>(gate->clone());
  copy->forward(x);
  EXPECT_TRUE(torch::equal(copy->tokens_since_update, expected));
  copy->update();
  EXPECT_TRUE(torch::equal(gate->tokens_since_update, expected));
  EXPECT_EQ(names_of(state_dict(*gate)), (std::vector<std::string>{"selection_bias", "w_gate"}));
}

// A step of 1e-3 from 1 would be lost in bfloat16.
TEST(SelectionBias, StaysPrecise) {
  TopKGate gate(TopKGateOptions(D, 6, 2).bias_update_rate(1e-3));
  gate->selection_bias.fill_(1);
  MoE layer(MoEOptions(D, 6, 2).gate(gate));
  layer->to(torch::kBFloat16);
  EXPECT_EQ(gate->w_gate.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(gate->selection_bias.scalar_type(), torch::kFloat);
  EXPECT_TRUE(torch::equal(gate->selection_bias, torch::ones(6)));
  layer->forward(torch::randn({9, D}, torch::kBFloat16));
  EXPECT_EQ(gate->tokens_since_update.sum().item<int64_t>(), 18);
  update_gates(*layer);
  EXPECT_TRUE((gate->selection_bias != 1).any().item<bool>());
  layer->to(torch::kCPU, torch::kDouble);
  EXPECT_EQ(gate->selection_bias.scalar_type(), torch::kDouble);
}

// FeedForwardExperts in the other two forms of ops::experts

// In training, the experts of a strictly balanced gate take the tokens with the largest scores.
TEST(NotANumber, ReachesTheOutputOfATokenWithoutExpert) {
  MoE layer(MoEOptions(D, 6, 2).gate(BalancedGate(BalancedGateOptions(D, 6, 2)).ptr()));
  auto x = torch::randn({20, D});
  x[3][1] = std::numeric_limits<double>::quiet_NaN();
  const auto y = std::get<0>(layer->forward(x));
  EXPECT_TRUE(y[3].isnan().all().item<bool>());
  EXPECT_EQ(y.isnan().any(1).sum().item<int64_t>(), 1);
}

TEST(FeedForward, ThreeFormsAgree) {
  FeedForwardExperts module(FeedForwardExpertsOptions(5, D).hidden_sizes({6}).bias(true));
  const auto x = torch::randn({9, D});
  const auto index = torch::stack({torch::arange(9) % 5, (torch::arange(9) + 2) % 5}, 1);
  const auto gates = torch::rand({9, 2});
  const auto plan = moe_ext::ops::dispatch_plan(index, 5);
  const auto rows = moe_ext::ops::dispatch(x, plan.inverse);
  const auto from_rows = module->forward(rows, plan.offsets);
  const auto from_tokens =
      module->forward_fused(x, {.offsets = plan.offsets, .inverse = plan.inverse});
  const auto mixture = module->forward_fused(
      x, {.offsets = plan.offsets, .inverse = plan.inverse, .gates = gates, .recompute = true});
  EXPECT_TRUE(same_bits(from_tokens, from_rows));
  EXPECT_TRUE(same_bits(mixture, moe_ext::ops::combine(from_rows, gates, plan.inverse)));
}

}  // namespace
