// Operators: the values and the gradients are those of Python.
#include "operators.h"

#include <gtest/gtest.h>

namespace {

using namespace exported;

class Operators : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(, Operators, testing::ValuesIn(names_of(operators)), test_name);

TEST_P(Operators, HaveThePythonBits) {
  static const auto cases = Tree::file("operators").branches();
  ASSERT_TRUE(cases.contains(GetParam() + " 0"));
  for (const auto& [name, given] : cases) {
    if (!name.starts_with(GetParam() + " ")) continue;
    SCOPED_TRACE(name);
    auto arguments = given / "arguments";
    const auto expected = given.list("outputs"), upstream = given.list("upstream");
    const auto gradients = (given / "gradients").tensors();
    std::vector<Tensor> leaves, differentiable, upstream_of_these;
    for (const auto& [path, gradient] : gradients) {
      leaves.push_back(arguments[path].requires_grad_());
    }
    const auto outputs = operators.at(GetParam())(arguments);
    ASSERT_EQ(outputs.size(), expected.size());
    auto next = upstream.begin();  // one for each floating-point output
    for (size_t i = 0; i < outputs.size(); ++i) {
      EXPECT_TRUE(same_bits(outputs[i], expected[i])) << "output " << i;
      if (!outputs[i].is_floating_point()) continue;
      const Tensor& gradient = *next++;
      if (!outputs[i].requires_grad()) continue;
      differentiable.push_back(outputs[i]);
      upstream_of_these.push_back(gradient);
    }
    if (leaves.empty()) continue;
    const auto grads = torch::autograd::grad(differentiable, leaves, upstream_of_these, {},
                                             /*create_graph=*/false, /*allow_unused=*/true);
    auto actual = grads.begin();
    for (const auto& [path, gradient] : gradients) {
      const auto& dx = *actual++;
      EXPECT_TRUE(same_bits(dx.defined() ? dx : torch::zeros_like(gradient), gradient)) << path;
    }
  }
}

TEST(OperatorErrors, NameTheDevice) {
  const auto gates = torch::rand({4, 2}), index = torch::zeros({4, 2}, torch::kLong);
  try {
    ops::importance(gates, index.to(torch::kMeta), 3);
    FAIL() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_STREQ(error.what_without_backtrace(),
                 "importance: expert_index must be on cpu like the first argument, got meta");
  }
}

}  // namespace
