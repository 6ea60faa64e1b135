// FactoredAdam: bitwise identical to Python, options of groups, and checkpoints.
#include <gtest/gtest.h>
#include <moe_ext/optim.h>

#include <cmath>
#include <limits>
#include <sstream>
#include <utility>

#include "exported.h"

namespace {

using namespace exported;
using moe_ext::optim::FactoredAdam;
using moe_ext::optim::FactoredAdamOptions;

// OPTIONS of export.py.
const std::map<std::string, FactoredAdamOptions> options = {
    {"default", FactoredAdamOptions()},
    {"mean_of_roots", FactoredAdamOptions(0.1).mean_of_roots(true).eps(1e-3)},
    {"full", FactoredAdamOptions().factored(false).beta2(0.9)},
};

class Optimizer : public testing::TestWithParam<std::string> {
 protected:
  Tree given() const { return Tree::file("optimizer") / GetParam(); }

  std::vector<Tensor> weights_after(int step) const {
    const auto tree = step < 0 ? given() : given() / "steps" / std::to_string(step);
    std::vector<Tensor> weights;
    for (const auto& weight : tree.list("weights")) {
      weights.push_back(weight.clone().requires_grad_());
    }
    return weights;
  }

  // Steps first to last - 1 with the gradients of Python; each result has Python's bits.
  void run(FactoredAdam& optimizer, std::vector<Tensor>& weights, int first, int last) const {
    for (int number = first; number < last; ++number) {
      SCOPED_TRACE("step " + std::to_string(number));
      const auto expected = given() / "steps" / std::to_string(number);
      const auto gradients = expected.list("gradients");
      for (size_t i = 0; i < weights.size(); ++i) weights[i].mutable_grad() = gradients[i];
      optimizer.step();
      for (size_t i = 0; i < weights.size(); ++i) {
        EXPECT_TRUE(same_bits(weights[i], expected.list("weights")[i])) << "weight " << i;
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(, Optimizer, testing::ValuesIn(names_of(options)), test_name);

TEST(TableOfOptions, IsThatOfPython) {
  EXPECT_EQ(names_of(options), names_of(Tree::file("optimizer").branches()));
}

TEST_P(Optimizer, HasThePythonBits) {
  auto weights = weights_after(-1);
  ASSERT_EQ(weights.size(), 3);
  FactoredAdam optimizer(weights, options.at(GetParam()));
  run(optimizer, weights, 0, 5);
}

TEST_P(Optimizer, ContinuesFromACheckpoint) {
  auto weights = weights_after(-1);
  FactoredAdam optimizer(weights, options.at(GetParam()));
  run(optimizer, weights, 0, 3);
  std::stringstream file;
  torch::save(optimizer, file);

  auto resumed = weights_after(2);
  FactoredAdam loaded(resumed, FactoredAdamOptions(123));  // the file has the options
  torch::load(loaded, file);
  run(loaded, resumed, 3, 5);
}

TEST(Groups, HaveTheirOwnOptions) {
  const auto make = [] {
    torch::manual_seed(0);
    auto weight = torch::randn({3, 4, 5}, torch::requires_grad());
    weight.mutable_grad() = torch::randn({3, 4, 5});
    return weight;
  };
  auto a = make(), b = make(), expected = make();
  FactoredAdam optimizer(
      {torch::optim::OptimizerParamGroup({a}),
       torch::optim::OptimizerParamGroup({b}, std::make_unique<FactoredAdamOptions>(0.5))},
      FactoredAdamOptions(0.25));
  FactoredAdam single({expected}, FactoredAdamOptions(0.5));
  optimizer.step();
  single.step();
  EXPECT_TRUE(same_bits(b, expected));
  EXPECT_FALSE(torch::equal(a, b));
  const auto start = make();
  EXPECT_TRUE(torch::allclose((a - start) * 2, b - start, 1e-4, 1e-5));
}

TEST(Steps, OfAClosureReturnItsLoss) {
  auto weight = torch::full({2, 2}, 3.0, torch::requires_grad());
  FactoredAdam optimizer({weight}, FactoredAdamOptions(0.1));
  Tensor first, last;
  for (int i = 0; i < 20; ++i) {
    last = optimizer.step([&] {
      optimizer.zero_grad();
      auto loss = weight.square().sum();
      loss.backward();
      return loss;
    });
    if (i == 0) first = last;
  }
  EXPECT_EQ(first.item<float>(), 36);
  EXPECT_LT(last.item<float>(), 10);
}

TEST(Steps, WithAWrongOptionOfALaterGroupChangeNothing) {
  const auto make = [] {
    auto weight = torch::ones({3, 4}, torch::requires_grad());
    weight.mutable_grad() = torch::ones({3, 4});
    return weight;
  };
  auto a = make(), b = make();
  FactoredAdam optimizer(
      {torch::optim::OptimizerParamGroup({a}), torch::optim::OptimizerParamGroup({b})});
  auto& options = static_cast<FactoredAdamOptions&>(optimizer.param_groups()[1].options());
  const double infinity = std::numeric_limits<double>::infinity();
  for (const auto& wrong : {FactoredAdamOptions(std::nan("")), FactoredAdamOptions(infinity),
                            FactoredAdamOptions().beta2(2), FactoredAdamOptions().eps(infinity)}) {
    options = wrong;
    EXPECT_THROW(optimizer.step(), c10::ValueError);
    EXPECT_TRUE(torch::equal(a, torch::ones({3, 4})));
    EXPECT_TRUE(optimizer.state().empty());
  }
}

TEST(Steps, ThatFailAreNotCounted) {
  auto weight = torch::ones({3, 4}, torch::requires_grad());
  FactoredAdam optimizer({weight});
  weight.mutable_grad() = torch::ones({3, 4});
  optimizer.step();
  auto& state = static_cast<moe_ext::optim::FactoredAdamParamState&>(
      *optimizer.state().at(weight.unsafeGetTensorImpl()));
  state.row(torch::ones({2}));
  EXPECT_THROW(optimizer.step(), c10::Error);
  EXPECT_EQ(state.step(), 1);
}

TEST(Checkpoints, ThatDoNotFitChangeNothing) {
  const auto make = [](at::IntArrayRef shape, double lr) {
    auto weight = torch::ones(shape, torch::requires_grad());
    weight.mutable_grad() = torch::ones(shape);
    FactoredAdam optimizer({weight}, FactoredAdamOptions(lr));
    optimizer.step();
    return std::pair(weight, std::move(optimizer));
  };
  const auto saved = [](FactoredAdam& optimizer) {
    std::stringstream file;
    torch::save(optimizer, file);
    return file.str();
  };
  auto [weight, optimizer] = make({3, 4}, 0.5);
  auto [other_weight, other] = make({4, 3}, 0.25);
  auto [wrong_weight, wrong] = make({3, 4}, 0.25);
  static_cast<FactoredAdamOptions&>(wrong.param_groups()[0].options()).beta2(2);
  const auto before = weight.detach().clone();
  for (auto* const each : {&other, &wrong}) {
    std::stringstream file(saved(*each));
    EXPECT_THROW(torch::load(optimizer, file), c10::ValueError);
    const auto& options = optimizer.param_groups()[0].options();
    EXPECT_EQ(static_cast<const FactoredAdamOptions&>(options).lr(), 0.5);
    const auto& state = static_cast<const moe_ext::optim::FactoredAdamParamState&>(
        *optimizer.state().at(weight.unsafeGetTensorImpl()));
    EXPECT_EQ(state.row().sizes(), at::IntArrayRef({3}));
  }
  optimizer.step();
}

// The square of the gradient is infinite in float32.
TEST(Steps, OfAGradientWhoseSquareOverflowsKeepTheWeights) {
  auto weight = torch::ones({3, 4}).requires_grad_();
  FactoredAdam optimizer({weight}, FactoredAdamOptions(0.1));
  for (const double gradient : {0.1, 2e19, 0.1}) {
    const auto before = weight.detach().clone();
    weight.mutable_grad() = torch::full({3, 4}, gradient);
    optimizer.step();
    EXPECT_TRUE(weight.isfinite().all().item<bool>());
    EXPECT_EQ(same_bits(weight, before), gradient == 2e19);
  }
}

}  // namespace
