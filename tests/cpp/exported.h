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
  static Tree file(const std::string& name) {
    return Tree(moe_ext::read_state_dict(folder + "/" + name + ".pt"));
  }

  // Splits the tree by the first part of the paths.
  std::map<std::string, Tree> branches() const {
    std::map<std::string, Tree> found;
    for (const auto& [path, tensor] : tensors_) {
      const auto slash = path.find('/');
      auto& branch = found.try_emplace(path.substr(0, slash), Tree(StateDict())).first->second;
      if (slash != std::string::npos) branch.tensors_[path.substr(slash + 1)] = tensor;
    }
    return found;
  }

  // The tree below a part; empty if there is none.
  Tree operator/(const std::string& part) const {
    Tree found{StateDict()};
    for (auto each = tensors_.lower_bound(part + "/");
         each != tensors_.end() && each->first.starts_with(part + "/"); ++each) {
      found.tensors_[each->first.substr(part.size() + 1)] = each->second;
    }
    return found;
  }

  const StateDict& tensors() const { return tensors_; }
  Tensor& operator[](const std::string& name) { return tensors_.at(name); }
  const Tensor& operator[](const std::string& name) const { return tensors_.at(name); }

  std::optional<Tensor> find(const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? std::nullopt : std::optional(found->second);
  }

  // The tensors name/0, name/1, ...
  std::vector<Tensor> list(const std::string& name) const {
    std::vector<Tensor> found;
    while (const auto tensor = find(name + "/" + std::to_string(found.size()))) {
      found.push_back(*tensor);
    }
    return found;
  }

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
  std::string text(const std::string& name) const {
    const auto tensor = tensors_.at(name).contiguous();
    return {reinterpret_cast<const char*>(tensor.const_data_ptr()), size_t(tensor.numel())};
  }

 private:
  StateDict tensors_;
};

// Compares bits: NaN equals itself, -0 differs from 0.
inline testing::AssertionResult same_bits(const Tensor& actual, const Tensor& expected) {
  if (actual.scalar_type() != expected.scalar_type() || actual.sizes() != expected.sizes()) {
    return testing::AssertionFailure()
           << actual.toString() << " " << actual.sizes() << " instead of " << expected.toString()
           << " " << expected.sizes();
  }
  const auto bits = [](const Tensor& x) {
    return x.detach().contiguous().reshape(-1).view(torch::kByte);
  };
  if (actual.numel() == 0 || torch::equal(bits(actual), bits(expected))) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure()
         << "bits differ, by up to "
         << (actual.detach().to(torch::kDouble) - expected.detach().to(torch::kDouble))
                .abs()
                .max()
                .item<double>();
}

// Expects the same names and bits.
inline void expect_same_bits(const StateDict& actual, const StateDict& expected) {
  for (const auto& [name, tensor] : expected) {
    const auto found = actual.find(name);
    if (found == actual.end()) {
      ADD_FAILURE() << name << " is missing";
    } else {
      EXPECT_TRUE(same_bits(found->second, tensor)) << name;
    }
  }
  for (const auto& [name, tensor] : actual) {
    EXPECT_TRUE(expected.contains(name)) << name << " is not expected";
  }
}

// Expects the class and the text of an error of export.py.
inline void expect_error(const Tree& expected, const std::function<void()>& call) {
  const auto kind = expected.text("kind"), message = expected.text("message");
  try {
    call();
  } catch (const c10::Error& error) {
    EXPECT_EQ(error.what_without_backtrace(), message);
    const auto actual = dynamic_cast<const c10::ValueError*>(&error)   ? "ValueError"
                        : dynamic_cast<const c10::TypeError*>(&error)  ? "TypeError"
                        : dynamic_cast<const c10::IndexError*>(&error) ? "IndexError"
                                                                       : "Error";
    EXPECT_EQ(actual, kind) << message;
    return;
  }
  ADD_FAILURE() << "no error, expected " << kind << ": " << message;
}

// Turns the name of a case into the name of a test, which has letters, digits and _ alone.
inline std::string test_name(const testing::TestParamInfo<std::string>& info) {
  auto name = info.param;
  for (char& letter : name) {
    if (!std::isalnum(static_cast<unsigned char>(letter))) letter = '_';
  }
  return name;
}

template <typename T>
std::vector<std::string> names_of(const std::map<std::string, T>& values) {
  std::vector<std::string> names;
  for (const auto& [name, value] : values) names.push_back(name);
  return names;
}

}  // namespace exported
