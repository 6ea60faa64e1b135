// Argument checks. Every message names the operator, the argument, the rule and the value.
//
// This header has the rules that several operators share; <operator>.h has the rules of one
// operator. Each rule is written once and runs on every device, Meta included, so sizes are SymInt.
// Values are checked on the CPU only: on a GPU, reading them would synchronize.
#pragma once

#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "tensor.h"

namespace moe_ext {

// For example "float32".
inline std::string name_of(at::ScalarType type) {
  return std::string(c10::getDtypeNames(type).first);
}

// Adds a name to a list for an error: "a, b, c".
inline void append_name(std::string& names, std::string_view name) {
  names.append(names.empty() ? "" : ", ").append(name);
}

inline void check_dim(const char* op, const char* name, const Tensor& tensor, int64_t dim) {
  TORCH_CHECK_VALUE(tensor.dim() == dim, op, ": ", name, " must have ", dim,
                    " dimensions, got shape ", tensor.sym_sizes());
}

inline void check_shape(const char* op, const char* name, const Tensor& tensor,
                        c10::SymIntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.sym_sizes() == shape, op, ": ", name, " must have shape ", shape,
                    ", got ", tensor.sym_sizes());
}

inline void check_floating(const char* op, const char* name, const Tensor& tensor) {
  const auto type = tensor.scalar_type();
  TORCH_CHECK_TYPE(
      type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16, op,
      ": ", name, " must be float32, float64, float16 or bfloat16, got ", name_of(type));
}

inline void check_type(const char* op, const char* name, const Tensor& tensor,
                       at::ScalarType type) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == type, op, ": ", name, " must have dtype ", name_of(type),
                   ", got ", name_of(tensor.scalar_type()));
}

inline void check_device(const char* op, const char* name, const Tensor& tensor,
                         const Tensor& like) {
  TORCH_CHECK_VALUE(tensor.device() == like.device(), op, ": ", name, " must be on ", like.device(),
                    " like the first argument, got ", tensor.device());
}

// Checks the type and the shape of an argument, and that it is on the device of `like`.
inline void check_argument(const char* op, const char* name, const Tensor& tensor,
                           const Tensor& like, at::ScalarType type, c10::SymIntArrayRef shape) {
  check_device(op, name, tensor, like);
  check_type(op, name, tensor, type);
  check_shape(op, name, tensor, shape);
}

// Checks an argument that holds indices. Kernels convert it with contiguous_index.
inline void check_index(const char* op, const char* name, const Tensor& index, const Tensor& like) {
  check_device(op, name, index, like);
  const auto type = index.scalar_type();
  TORCH_CHECK_TYPE(type == at::kLong || type == at::kInt, op, ": ", name,
                   " must be int64 or int32, got ", name_of(type));
}

inline void check_index(const char* op, const char* name, const Tensor& index, const Tensor& like,
                        c10::SymIntArrayRef shape) {
  check_index(op, name, index, like);
  check_shape(op, name, index, shape);
}

// Checks `bounds`, which holds the start of each range and the end of the last: `least` elements or
// more.
inline void check_bounds(const char* op, const char* name, const Tensor& bounds, const Tensor& like,
                         int64_t least) {
  check_index(op, name, bounds, like);
  check_dim(op, name, bounds, 1);
  TORCH_CHECK_VALUE(bounds.sym_size(0) >= least, op, ": ", name, " must have at least ", least,
                    least == 1 ? " element" : " elements", ", got ", bounds.sym_size(0));
}

inline void check_num_experts(const char* op, const c10::SymInt& num_experts, int64_t least = 1) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  // A compiler cannot compare a symbolic number, such as the number of tokens of a mask, with
  // kMost.
  const auto value = num_experts.maybe_as_int();
  TORCH_CHECK_VALUE(num_experts >= least && (!value || *value <= kMost), op,
                    ": num_experts must be between ", least, " and ", kMost, ", got ", num_experts);
}

// Checks the number of experts of a token.
inline void check_k(const char* op, const char* name, const c10::SymInt& k,
                    const c10::SymInt& num_experts) {
  TORCH_CHECK_VALUE(k >= 1 && k <= num_experts, op, ": ", name,
                    " must be between 1 and num_experts = ", num_experts, ", got ", k);
}

// Checks that every element of a contiguous int64 CPU tensor is in [least, limit). Kernels access
// memory through these indices.
inline void check_index_range(const char* op, const char* name, const Tensor& index, int64_t limit,
                              int64_t least = 0) {
  const auto* data = index.const_data_ptr<int64_t>();
  const int64_t size = index.numel();
  bool valid = true;
  for (int64_t i = 0; i < size; ++i) valid &= data[i] >= least && data[i] < limit;
  if (valid) return;
  const auto* wrong = std::find_if(data, data + size,
                                   [&](int64_t value) { return value < least || value >= limit; });
  TORCH_CHECK_INDEX(false, op, ": ", name, " must be at least ", least, " and below ", limit,
                    ", got ", *wrong);
}

// Checks the values of expert_index, a contiguous int64 CPU tensor [T, K]: the experts of a token
// differ.
inline void check_chosen_experts(const char* op, const Tensor& expert_index, int64_t num_experts) {
  constexpr auto name = "expert_index";
  check_index_range(op, name, expert_index, num_experts);
  const int64_t num_tokens = expert_index.size(0), k = expert_index.size(1);
  const auto* data = expert_index.const_data_ptr<int64_t>();
  std::vector<int64_t> last_token(num_experts, -1);  // the last token of each expert so far
  for (int64_t t = 0; t < num_tokens; ++t) {
    const at::IntArrayRef experts(data + t * k, k);
    for (const int64_t e : experts) {
      TORCH_CHECK_VALUE(last_token[e] != t, op, ": ", name,
                        " must have different experts for each token, got ", experts);
      last_token[e] = t;
    }
  }
}

// Checks a contiguous int64 CPU tensor [n + 1] that holds the bounds of n groups of rows.
inline void check_offsets(const char* op, const char* name, const Tensor& offsets,
                          int64_t num_rows) {
  const at::IntArrayRef bounds(offsets.const_data_ptr<int64_t>(), offsets.numel());
  const auto rule = [&] {
    return c10::str(op, ": ", name, " must ascend from 0 to the number of rows ", num_rows,
                    ", got ");
  };
  const auto* sorted = std::is_sorted_until(bounds.begin(), bounds.end());
  TORCH_CHECK_VALUE(sorted == bounds.end(), rule(), *sorted, " after ", sorted[-1]);
  TORCH_CHECK_VALUE(bounds.front() == 0 && bounds.back() == num_rows, rule(), bounds.front(),
                    " to ", bounds.back());
}

// Checks that a contiguous int64 CPU tensor holds each of 0 ... size - 1 once. Every element of an
// output that is written through it is then initialized.
inline void check_permutation(const char* op, const char* name, const Tensor& index) {
  check_index_range(op, name, index, index.numel());
  const auto* data = index.const_data_ptr<int64_t>();
  std::vector<char> seen(index.numel(), 0);
  for (int64_t i = 0; i < index.numel(); ++i) {
    TORCH_CHECK_VALUE(!seen[data[i]], op, ": ", name, " must contain each row index once, got ",
                      data[i], " twice");
    seen[data[i]] = 1;
  }
}

}  // namespace moe_ext
