// Modes of LibTorch: autocast and inference; and the facts of the build.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <moe_ext/build.h>
#include <moe_ext/version.h>
#include <torch/version.h>

#include "modules.h"

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

TEST(Autocast, KeepsTheGateInFloat32) {
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

// Autocast casts x once, for the experts and the shared expert. So their gradients are summed in
// bfloat16.
TEST(Autocast, HasThePythonBits) {
  const auto given = Tree::file("autocast"), expected = given / "step";
  MoE layer(MoEOptions(D, 6, 2).shared_expert(torch::nn::Linear(D, D)));
  moe_ext::load_state_dict(*layer, (given / "weights").tensors());
  layer->eval();
  Autocast autocast;
  const auto [results, gradients] =
      step(*layer, expected / "inputs", (expected / "upstream").tensors());
  expect_same_bits(results, (expected / "results").tensors());
  expect_same_bits(gradients, (expected / "gradients").tensors());
}

TEST(InferenceMode, RunsLayers) {
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
    const auto actual = call(*layer, inputs);
    EXPECT_TRUE(actual.at("y").is_inference());
    expect_same_bits(actual, expected);
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
