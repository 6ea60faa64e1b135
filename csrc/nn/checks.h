// Argument checks of the modules. Every message names class, argument, rule and value, with the
// same text as moe_ext/checks.py. An `owner` is the name of the class or function.
#pragma once

#include <c10/util/safe_numerics.h>
#include <torch/nn/module.h>

#include <array>
#include <cmath>
#include <limits>
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

// Requires a number that is at least `minimum`. Layers compute in float32. So a number other than 0
// must not round to 0 or infinity there.
inline void require_at_least(const char* owner, const char* name, double value, double minimum) {
  using Limits = std::numeric_limits<float>;
  const double size = std::abs(value);
  TORCH_CHECK_VALUE(std::isfinite(value), owner, ": ", name, " must be a finite number, got ",
                    value);
  TORCH_CHECK_VALUE(value >= minimum, owner, ": ", name, " must be at least ", minimum, ", got ",
                    value);
  TORCH_CHECK_VALUE(size == 0 || (Limits::min() <= size && size <= Limits::max()), owner, ": ",
                    name, " must be 0 or a number of float32 (magnitude 1.2e-38 to 3.4e+38), got ",
                    value);
}

inline void require_positive(const char* owner, const char* name, double value) {
  require_at_least(owner, name, value, std::numeric_limits<double>::lowest());
  TORCH_CHECK_VALUE(value > 0, owner, ": ", name, " must be a number above 0, got ", value);
}

inline void require_size(const char* owner, const char* name, int64_t value, int64_t minimum = 1) {
  TORCH_CHECK_VALUE(value >= minimum, owner, ": ", name, " must be at least ", minimum, ", got ",
                    value);
}

// Multiplies two sizes. name: the product, in errors.
inline int64_t product_of(const char* owner, const char* name, int64_t a, int64_t b) {
  int64_t product = 0;
  TORCH_CHECK_VALUE(!c10::mul_overflows(a, b, &product), owner, ": ", name, " must be at most ",
                    std::numeric_limits<int64_t>::max(), ", got ", a, " * ", b);
  return product;
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
  return product_of(owner, "num_groups * experts_per_group", num_groups, experts_per_group);
}

// Returns the number of experts of a token of a two-level gate, k1 * k2.
inline int64_t k_of_levels(const char* owner, const std::array<int64_t, 2>& k) {
  return product_of(owner, "k1 * k2", k[0], k[1]);
}

inline void require_defined(const char* owner, const char* name, const Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.defined(), owner, ": ", name, " must be a tensor, got an undefined one");
}

inline void require_shape(const char* owner, const char* name, const Tensor& tensor,
                          at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.sizes() == shape, owner, ": ", name, " must have shape ",
                    tuple_of(shape), ", got ", tuple_of(tensor.sizes()));
}

inline void require_floating(const char* owner, const Tensor& x, const char* name = "x") {
  TORCH_CHECK_TYPE(x.is_floating_point(), owner, ": ", name,
                   " must have a floating-point dtype, got torch.", name_of(x.scalar_type()));
}

inline void require_dtype(const char* owner, std::optional<at::ScalarType> dtype) {
  TORCH_CHECK_TYPE(!dtype || at::isFloatingType(*dtype), owner,
                   ": dtype must be a floating-point dtype, got torch.", name_of(*dtype));
}

inline void require_dense(const char* owner, const Tensor& x) {
  require_defined(owner, "x", x);
  TORCH_CHECK_VALUE(!x.is_nested(), owner, ": x must be a dense tensor, got a nested tensor");
}

// Requires that x is a floating-point tensor [T, d_model].
inline void require_tokens(const char* owner, const Tensor& x, int64_t d_model) {
  require_dense(owner, x);
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) == d_model, owner,
                    ": x must have shape [T, d_model = ", d_model, "], got ", tuple_of(x.sizes()));
  require_floating(owner, x);
}

inline void require_mask(const char* owner, const Tensor& mask, at::IntArrayRef shape) {
  require_defined(owner, "mask", mask);
  TORCH_CHECK_TYPE(mask.scalar_type() == at::kBool, owner,
                   ": mask must have dtype torch.bool, got torch.", name_of(mask.scalar_type()));
  require_shape(owner, "mask", mask, shape);
}

}  // namespace moe_ext::nn
