// Modules: bitwise identical to Python, and weights that go both ways.
#include "modules.h"

#include <gtest/gtest.h>
#include <moe_ext/state_dict.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <sstream>

namespace {

using namespace exported;
using moe_ext::load_state_dict;
using moe_ext::read_state_dict;
using moe_ext::state_dict;
using moe_ext::write_state_dict;

const std::map<std::string, Tree>& cases() {
  static const auto branches = Tree::file("modules").branches();
  return branches;
}

TEST(TableOfLayers, IsThatOfPython) { EXPECT_EQ(names_of(layers), names_of(cases())); }

// Whether a gate has a selection bias.
bool adapts(const torch::nn::Module& module) {
  const auto names = names_of(state_dict(module));
  return std::any_of(names.begin(), names.end(),
                     [](const auto& name) { return name.ends_with("selection_bias"); });
}

class Layers : public testing::TestWithParam<std::string> {
 protected:
  const Tree& given() const { return cases().at(GetParam()); }
  std::shared_ptr<torch::nn::Module> make() const { return layers.at(GetParam())(); }

  // With the weights of the case.
  std::shared_ptr<torch::nn::Module> make_loaded() const {
    const auto module = make();
    load_state_dict(*module, (given() / "weights").tensors());
    return module;
  }

  std::string path(const std::string& writer) const {
    return folder + "/" + GetParam() + "." + writer + ".pt";
  }
  MoEImpl& as_layer(torch::nn::Module& module) const { return dynamic_cast<MoEImpl&>(module); }
};
INSTANTIATE_TEST_SUITE_P(, Layers, testing::ValuesIn(names_of(layers)), test_name);

TEST_P(Layers, StartWithThePythonWeights) {
  torch::manual_seed(7);
  expect_same_bits(state_dict(*make()), (given() / "initial").tensors());
}

TEST_P(Layers, StepsHaveThePythonBits) {
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

TEST_P(Layers, CloneIsDeep) {
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

TEST_P(Layers, StateDictsThatDoNotFitChangeNothing) {
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
  const auto last = before.rbegin()->second;
  for (const auto& value : {Tensor(), last.to(torch::kMeta), last.to_sparse()}) {
    wrong.rbegin()->second = value;
    EXPECT_THROW(load_state_dict(*module, wrong), c10::TypeError);
    expect_same_bits(state_dict(*module), before);
  }
}

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
  const auto [next_y, next_aux] = layer->forward(torch::randn({7, D}));
  EXPECT_NEAR(next_aux.loss.item<double>(), 0.25 * h * h, 1e-6);
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

// Module::to converts every buffer, but a file with flags that are not bool loses them.
TEST(FlagsOfBalancedGates, StayBool) {
  const HierarchicalBalancedGateOptions two_levels(D, 3, 2, {1, 2});
  for (const auto& make : std::vector<std::function<MoE()>>{
           [] { return MoE(with_gate(BalancedGate(BalancedGateOptions(D, 6, 2)))); },
           [&] { return MoE(with_gate(HierarchicalBalancedGate(two_levels))); }}) {
    MoE layer = make();
    layer->to(torch::kDouble);
    layer->forward(torch::randn({12, D}, torch::kDouble));
    layer->to(torch::kCPU, torch::kBFloat16);
    layer->to(torch::kCPU);
    layer->to(torch::kFloat);
    {
      torch::NoGradGuard guard;
      for (const auto& parameter : layer->parameters()) parameter.fill_(0.25);
    }
    std::stringstream file;
    torch::save(layer, file);
    MoE loaded = make();
    torch::load(loaded, file);
    loaded->forward(torch::randn({12, D}));  // sets no thresholds
    expect_same_bits(state_dict(*loaded), state_dict(*layer));
    for (const auto& flag : loaded->buffers()) {
      EXPECT_EQ(flag.scalar_type(), torch::kBool);
      EXPECT_TRUE(flag.item<bool>());
    }
  }
}

// In training, the experts of a strictly balanced gate take the tokens with the largest scores.
TEST(NotANumber, ReachesTheOutputOfATokenWithoutExpert) {
  MoE layer(MoEOptions(D, 6, 2).gate(BalancedGate(BalancedGateOptions(D, 6, 2)).ptr()));
  auto x = torch::randn({20, D});
  x[3][1] = std::numeric_limits<double>::quiet_NaN();
  const auto y = std::get<0>(layer->forward(x));
  EXPECT_TRUE(y[3].isnan().all().item<bool>());
  EXPECT_EQ(y.isnan().any(1).sum().item<int64_t>(), 1);
}

}  // namespace
