// Modes of LibTorch: autocast, no gradient, inference, the meta device, other dtypes; and the facts
// of the build.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <moe_ext/build.h>
#include <moe_ext/version.h>
#include <torch/version.h>

#include "modules.h"
#include "operators.h"

namespace {

using namespace exported;

class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  }
  ~Autocast() {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

TEST(Operators, RunExpertsInBfloat16UnderAutocast) {
  const auto x = torch::randn({6, D}), w = torch::randn({3, D, 4});
  const auto logits = torch::randn({6, 3}, torch::kBFloat16);
  const auto lower = [](const Tensor& tensor) { return tensor.to(torch::kBFloat16); };
  const auto expected = ops::experts(lower(x), {lower(w)});
  const auto kept = ops::noisy_topk_gating(logits.to(torch::kFloat), {}, {}, 2);
  Autocast autocast;
  EXPECT_TRUE(same_bits(ops::experts(x, {w}), expected));
  EXPECT_TRUE(same_bits(ops::noisy_topk_gating(logits, {}, {}, 2).gates, kept.gates));
}

TEST(Layers, KeepTheGateInFloat32UnderAutocast) {
  MoE layer(MoEOptions(D, 6, 2));
  layer->eval();
  {
    torch::NoGradGuard guard;
    for (auto& parameter : layer->parameters()) parameter.normal_();
  }
  const auto x = torch::randn({20, D});
  const auto [y, aux] = layer->forward(x);
  Autocast autocast;
  const auto [cast, cast_aux] = layer->forward(x);
  EXPECT_TRUE(same_bits(cast_aux.gates, aux.gates));
  EXPECT_TRUE(same_bits(cast_aux.loss, aux.loss));
  EXPECT_EQ(cast.scalar_type(), torch::kFloat);
  EXPECT_FALSE(torch::equal(cast, y));
  EXPECT_TRUE(torch::allclose(cast, y, 0.1, 0.3));
}

TEST(Layers, SaveNoGraphWithoutGradients) {
  MoE layer(MoEOptions(D, 6, 2));
  const auto x = torch::randn({20, D}, torch::requires_grad());
  EXPECT_TRUE(std::get<0>(layer->forward(x)).requires_grad());
  torch::NoGradGuard guard;
  const auto [y, aux] = layer->forward(x);
  EXPECT_FALSE(y.requires_grad());
  EXPECT_FALSE(aux.loss.requires_grad());
}

TEST(Layers, RunInInferenceMode) {
  for (const auto& [name, make] : layers) {
    SCOPED_TRACE(name);
    const auto layer = make();
    layer->eval();
    const Tree inputs({{"x", torch::randn({20, D})}});
    StateDict expected;
    {
      torch::NoGradGuard guard;
      expected = call(*layer, inputs);
    }
    c10::InferenceMode mode;
    const auto found = call(*layer, inputs);
    EXPECT_TRUE(found.at("y").is_inference());
    expect_same_bits(found, expected);
  }
}

TEST(Operators, HaveShapesOnTheMetaDevice) {
  for (const auto& [name, operation] : operators) {
    const auto given = Tree::file("operators") / (name + " 0");
    ASSERT_FALSE(given.tensors().empty());
    const auto arguments = given / "arguments";
    StateDict on_meta;
    for (const auto& [path, tensor] : arguments.tensors()) {
      // Numbers and texts stay on the CPU.
      on_meta[path] = tensor.dim() == 0 || tensor.scalar_type() == torch::kByte
                          ? tensor
                          : tensor.to(torch::kMeta);
    }
    const auto expected = operation(arguments), found = operation(Tree(on_meta));
    for (size_t i = 0; i < expected.size(); ++i) {
      SCOPED_TRACE(name + ", output " + std::to_string(i));
      EXPECT_TRUE(found[i].is_meta());
      EXPECT_EQ(found[i].sizes(), expected[i].sizes());
      EXPECT_EQ(found[i].scalar_type(), expected[i].scalar_type());
    }
  }
}

TEST(Layers, MoveToAnotherDtype) {
  for (const auto& [name, make] : layers) {
    if (name == "MoE generator") continue;
    SCOPED_TRACE(name);
    const auto layer = make();
    layer->to(torch::kDouble);
    const auto x = torch::randn({20, D}, torch::kDouble).requires_grad_();
    const auto found = call(*layer, Tree({{"x", x}}));
    EXPECT_EQ(found.at("y").scalar_type(), torch::kDouble);
    EXPECT_EQ(found.at("gates").scalar_type(), torch::kDouble);
    found.at("y").sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), torch::kDouble);
  }
}

TEST(Layers, RunInASequential) {
  torch::nn::Sequential model(torch::nn::Linear(4, D), MoE(MoEOptions(D, 6, 2)));
  const auto [y, aux] = model->forward<std::tuple<Tensor, MoEAux>>(torch::randn({5, 4}));
  EXPECT_EQ(y.sizes(), (std::vector<int64_t>{5, D}));
  EXPECT_TRUE(aux.loss.requires_grad());
}

TEST(Operators, RefuseASecondDerivative) {
  const auto x = torch::randn({6, D}, torch::requires_grad());
  const auto w = torch::randn({3, D, 4}, torch::requires_grad());
  const auto y = ops::experts(x, {w}).square().sum();
  const auto first = torch::autograd::grad({y}, {w}, {}, /*retain_graph=*/true,
                                           /*create_graph=*/true)[0];
  ASSERT_TRUE(first.requires_grad());
  try {
    torch::autograd::grad({first.square().sum()}, {w});
    ADD_FAILURE() << "no error";
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    EXPECT_NE(message.find("_experts_backward"), std::string::npos) << message;
  }
}

TEST(Build, NamesItsVersions) {
  EXPECT_EQ(moe_ext::version(), MOE_EXT_VERSION);
  const std::string torch_version = moe_ext::torch_version();
  EXPECT_TRUE(torch_version.starts_with(std::to_string(TORCH_VERSION_MAJOR) + "." +
                                        std::to_string(TORCH_VERSION_MINOR) + "."));
  EXPECT_FALSE(moe_ext::compiler().empty());
  EXPECT_FALSE(moe_ext::isa().empty());
  EXPECT_EQ(names_of(moe_ext::products()),
            (std::vector<std::string>{"bfloat16", "float16", "float32", "float64"}));
  moe_ext::empty_cache();
}

}  // namespace
