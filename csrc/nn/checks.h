// Argument checks of the modules. Every message names class, argument, rule and value, with the
// same text as moe_ext/checks.py. An `owner` is the name of the class or function.
#pragma once

#include <torch/nn/module.h>

#include <array>
#include <string>
#include <string_view>

#include "../checks.h"

namespace moe_ext::nn {

// Formats sizes as a tuple of Python, such as "(3, 4)" or "(3,)".
inline std::string tuple_of(at::IntArrayRef sizes) {
  return c10::str("(", c10::Join(", ", sizes), sizes.size() == 1 ? ",)" : ")");
}

// Returns the class of a module as Python names it, such as "TopKGate".
inline std::string class_of(const torch::nn::Module& module) {
  std::string_view name = module.name();
  const auto colons = name.rfind("::");
  if (colons != name.npos) name.remove_prefix(colons + 2);
  if (name.ends_with("Impl")) name.remove_suffix(4);
  return std::string(name);
}

template <typename Number>
void require_at_least(const char* owner, const char* name, Number value, Number minimum) {
  TORCH_CHECK_VALUE(value >= minimum, owner, ": ", name, " must be at least ", minimum, ", got ",
                    value);
}

inline void require_positive(const char* owner, const char* name, double value) {
  TORCH_CHECK_VALUE(value > 0, owner, ": ", name, " must be a number above 0, got ", value);
}

inline void require_size(const char* owner, const char* name, int64_t value) {
  require_at_least<int64_t>(owner, name, value, 1);
}

inline void require_k(const char* owner, int64_t k, int64_t num_experts) {
  TORCH_CHECK_VALUE(1 <= k && k <= num_experts, owner,
                    ": k must be a whole number between 1 and num_experts = ", num_experts,
                    ", got ", k);
}

// Checks the sizes of a two-level gate. Returns the number of experts, num_groups *
// experts_per_group.
inline int64_t num_experts_of_levels(const char* owner, int64_t d_model, int64_t num_groups,
                                     int64_t experts_per_group, const std::array<int64_t, 2>& k) {
  require_size(owner, "d_model", d_model);
  require_size(owner, "num_groups", num_groups);
  require_size(owner, "experts_per_group", experts_per_group);
  TORCH_CHECK_VALUE(1 <= k[0] && k[0] <= num_groups, owner,
                    ": k must be between 1 and num_groups = ", num_groups,
                    " at the first level, got ", tuple_of(k));
  TORCH_CHECK_VALUE(1 <= k[1] && k[1] <= experts_per_group, owner,
                    ": k must be between 1 and experts_per_group = ", experts_per_group,
                    " at the second level, got ", tuple_of(k));
  return num_groups * experts_per_group;
}

inline void require_shape(const char* owner, const char* name, const Tensor& tensor,
                          at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.sizes() == shape, owner, ": ", name, " must have shape ",
                    tuple_of(shape), ", got ", tuple_of(tensor.sizes()));
}

inline void require_floating(const char* owner, const Tensor& x) {
  TORCH_CHECK_TYPE(x.is_floating_point(), owner, ": x must have a floating-point dtype, got torch.",
                   name_of(x.scalar_type()));
}

inline void require_mask(const char* owner, const Tensor& mask, at::IntArrayRef shape) {
  TORCH_CHECK_TYPE(mask.scalar_type() == at::kBool, owner,
                   ": mask must have dtype torch.bool, got torch.", name_of(mask.scalar_type()));
  require_shape(owner, "mask", mask, shape);
}

}  // namespace moe_ext::nn
