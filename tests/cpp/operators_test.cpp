// Operators: values and gradients of tests/reference.py, and the texts of errors.
#include "operators.h"

#include <gtest/gtest.h>

namespace {

using namespace exported;

class Operators : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(, Operators, testing::ValuesIn(names_of(operators)), test_name);

// The cases "<operator> ..." of a file.
std::map<std::string, Tree> cases_of(const std::string& file, const std::string& name) {
  static std::map<std::string, std::map<std::string, Tree>> files;
  if (!files.contains(file)) files.emplace(file, Tree::file(file).branches());
  std::map<std::string, Tree> found;
  for (const auto& [key, tree] : files.at(file)) {
    if (key.starts_with(name + " ")) found.emplace(key, tree);
  }
  return found;
}

// export.py argues the allowed errors: one number, or one for each element.
void expect_near(const Tensor& actual, const Tensor& exact, const Tensor& allowed) {
  ASSERT_EQ(actual.sizes(), exact.sizes());
  ASSERT_EQ(actual.is_floating_point(), exact.is_floating_point());
  const auto a = actual.detach().to(torch::kDouble), e = exact.to(torch::kDouble);
  // Infinities are equal; they have no error.
  const auto good = (a == e) | (a.isnan() & e.isnan()) | ((a - e).abs() <= allowed);
  EXPECT_TRUE(good.all().item<bool>()) << "error up to " << (a - e).abs().max().item<double>()
                                       << ", allowed " << allowed.max().item<double>();
}

TEST_P(Operators, EqualReference) {
  const auto cases = cases_of("operators", GetParam());
  ASSERT_FALSE(cases.empty());
  for (const auto& [name, given] : cases) {
    SCOPED_TRACE(name);
    auto arguments = given / "arguments";
    const auto exact = given / "gradients", allowed = given / "allowed_gradients";
    std::vector<Tensor> leaves;
    for (const auto& [path, gradient] : exact.tensors()) {
      leaves.push_back(arguments[path].requires_grad_());
    }
    const auto outputs = operators.at(GetParam())(arguments);
    const auto expected = given.list("outputs"), errors = given.list("allowed_outputs");
    ASSERT_EQ(outputs.size(), expected.size());
    const auto upstream = given.list("upstream");  // one for each floating-point output
    auto next = upstream.begin();
    std::vector<Tensor> differentiable, upstream_of_these;
    for (size_t i = 0; i < outputs.size(); ++i) {
      SCOPED_TRACE("output " + std::to_string(i));
      expect_near(outputs[i], expected[i], errors[i]);
      if (!outputs[i].is_floating_point()) continue;
      const Tensor& gradient = *next++;
      if (!outputs[i].requires_grad()) continue;
      differentiable.push_back(outputs[i]);
      upstream_of_these.push_back(gradient);
    }
    if (leaves.empty()) continue;
    const auto found = torch::autograd::grad(differentiable, leaves, upstream_of_these, {},
                                             /*create_graph=*/false, /*allow_unused=*/true);
    size_t i = 0;
    for (const auto& [path, gradient] : exact.tensors()) {
      SCOPED_TRACE("gradient of " + path);
      const auto& leaf = leaves[i];
      const auto actual = found[i].defined() ? found[i] : torch::zeros_like(leaf);
      EXPECT_EQ(actual.scalar_type(), leaf.scalar_type());
      expect_near(actual, gradient, allowed[path]);
      ++i;
    }
  }
}

TEST_P(Operators, ErrorsHaveThePythonText) {
  const auto cases = cases_of("operator_errors", GetParam());
  ASSERT_FALSE(cases.empty());
  for (const auto& [name, given] : cases) {
    SCOPED_TRACE(name);
    const auto arguments = given / "arguments";
    expect_error(given, [&, &call = operators.at(GetParam())] { call(arguments); });
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
