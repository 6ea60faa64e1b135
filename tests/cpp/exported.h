// What export.py wrote, and comparisons with it.
#pragma once

#include <gtest/gtest.h>
#include <moe_ext/state_dict.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace exported {

using moe_ext::StateDict;
using torch::Tensor;

// The folder to which export.py wrote; CMakeLists.txt sets it.
inline const std::string folder = MOE_EXT_EXPORTED;

// Tensors by path, such as "load 3/arguments/expert_index".
class Tree {
 public:
  explicit Tree(StateDict tensors) : tensors_(std::move(tensors)) {}

  // Reads a file of export.py.
  static Tree file(const std::string& name);

  // Splits the tree by the first part of the paths.
  std::map<std::string, Tree> branches() const;

  // The tree below a part; empty if there is none.
  Tree operator/(const std::string& part) const;

  const StateDict& tensors() const { return tensors_; }
  Tensor& operator[](const std::string& name) { return tensors_.at(name); }
  const Tensor& operator[](const std::string& name) const { return tensors_.at(name); }

  std::optional<Tensor> find(const std::string& name) const;

  // The tensors name/0, name/1, ...
  std::vector<Tensor> list(const std::string& name) const;

  // Numbers and texts; `otherwise` if the name is missing.
  template <typename T>
  T number(const std::string& name, T otherwise) const {
    const auto tensor = find(name);
    return tensor ? tensor->item<T>() : otherwise;
  }
  template <typename T>
  T number(const std::string& name) const {
    return tensors_.at(name).item<T>();
  }
  std::string text(const std::string& name) const;

 private:
  StateDict tensors_;
};

// Compares bits: NaN equals itself, -0 differs from 0.
testing::AssertionResult same_bits(const Tensor& actual, const Tensor& expected);

// Expects the same names and bits.
void expect_same_bits(const StateDict& actual, const StateDict& expected);

// Expects the class and the text of an error of export.py.
void expect_error(const Tree& expected, const std::function<void()>& call);

// Turns the name of a case into the name of a test, which has letters, digits and _ alone.
std::string test_name(const testing::TestParamInfo<std::string>& info);

template <typename T>
std::vector<std::string> names_of(const std::map<std::string, T>& values) {
  std::vector<std::string> names;
  for (const auto& [name, value] : values) names.push_back(name);
  return names;
}

}  // namespace exported
