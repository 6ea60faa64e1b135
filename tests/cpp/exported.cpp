#include "exported.h"

#include <cctype>

namespace exported {

Tree Tree::file(const std::string& name) {
  return Tree(moe_ext::read_state_dict(folder + "/" + name + ".pt"));
}

std::map<std::string, Tree> Tree::branches() const {
  std::map<std::string, Tree> branches;
  for (const auto& [path, tensor] : tensors_) {
    const auto slash = path.find('/');
    auto& branch = branches.try_emplace(path.substr(0, slash), Tree(StateDict())).first->second;
    if (slash != std::string::npos) branch.tensors_[path.substr(slash + 1)] = tensor;
  }
  return branches;
}

Tree Tree::operator/(const std::string& part) const {
  Tree branch{StateDict()};
  for (auto entry = tensors_.lower_bound(part + "/");
       entry != tensors_.end() && entry->first.starts_with(part + "/"); ++entry) {
    branch.tensors_[entry->first.substr(part.size() + 1)] = entry->second;
  }
  return branch;
}

std::optional<Tensor> Tree::find(const std::string& name) const {
  const auto entry = tensors_.find(name);
  return entry == tensors_.end() ? std::nullopt : std::optional(entry->second);
}

std::vector<Tensor> Tree::list(const std::string& name) const {
  std::vector<Tensor> tensors;
  while (const auto tensor = find(name + "/" + std::to_string(tensors.size()))) {
    tensors.push_back(*tensor);
  }
  return tensors;
}

std::string Tree::text(const std::string& name) const {
  const auto tensor = tensors_.at(name).contiguous();
  return {static_cast<const char*>(tensor.const_data_ptr()), size_t(tensor.numel())};
}

testing::AssertionResult same_bits(const Tensor& actual, const Tensor& expected) {
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
  const auto wide = [](const Tensor& x) { return x.detach().to(torch::kDouble); };
  return testing::AssertionFailure()
         << "bits differ, by up to " << (wide(actual) - wide(expected)).abs().max().item<double>();
}

void expect_same_bits(const StateDict& actual, const StateDict& expected) {
  for (const auto& [name, tensor] : expected) {
    const auto entry = actual.find(name);
    if (entry == actual.end()) {
      ADD_FAILURE() << name << " is missing";
    } else {
      EXPECT_TRUE(same_bits(entry->second, tensor)) << name;
    }
  }
  for (const auto& [name, tensor] : actual) {
    EXPECT_TRUE(expected.contains(name)) << name << " is not expected";
  }
}

void expect_error(const Tree& expected, const std::function<void()>& call) {
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

std::string test_name(const testing::TestParamInfo<std::string>& info) {
  auto name = info.param;
  for (char& letter : name) {
    if (!std::isalnum(static_cast<unsigned char>(letter))) letter = '_';
  }
  return name;
}

}  // namespace exported
