// Argument checks: every message names the op, the argument, the rule and what came.
//
// Each op's checks are written once and run by every kernel, the Meta kernel included (hence
// SymInt). Values are checked only on the CPU, where reading them costs nothing.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "math/activation.h"

namespace moe_ext {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

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
      ": ", name, " must be float32, float64, float16 or bfloat16, got ", type);
}

inline void check_type(const char* op, const char* name, const Tensor& tensor,
                       at::ScalarType type) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == type, op, ": ", name, " must be of type ", type,
                   ", got ", tensor.scalar_type());
}

inline void check_device(const char* op, const char* name, const Tensor& tensor,
                         const Tensor& like) {
  TORCH_CHECK_VALUE(tensor.device() == like.device(), op, ": ", name, " must be on ", like.device(),
                    " like the first argument, got ", tensor.device());
}

// An argument of a given type and shape, on the device of `like`.
inline void check_argument(const char* op, const char* name, const Tensor& tensor,
                           const Tensor& like, at::ScalarType type, c10::SymIntArrayRef shape) {
  check_device(op, name, tensor, like);
  check_type(op, name, tensor, type);
  check_shape(op, name, tensor, shape);
}

// Every element of a contiguous CPU tensor of indices must lie in [least, limit): memory depends on
// it.
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

// A contiguous CPU tensor [n + 1] of the bounds of n groups of rows.
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

// A contiguous CPU tensor of indices must hold each of 0 ... size - 1 once: what is written through
// it is then written whole.
inline void check_permutation(const char* op, const char* name, const Tensor& index) {
  check_index_range(op, name, index, index.numel());
  const auto* data = index.const_data_ptr<int64_t>();
  std::vector<char> seen(index.numel(), 0);
  for (int64_t i = 0; i < index.numel(); ++i) {
    TORCH_CHECK_VALUE(!seen[data[i]], op, ": ", name, " must hold each row once, got ", data[i],
                      " twice");
    seen[data[i]] = 1;
  }
}

// Where each of some ranges begins and the last one ends: at least that many.
inline void check_bounds(const char* op, const char* name, const Tensor& bounds, const Tensor& like,
                         int64_t least) {
  check_device(op, name, bounds, like);
  check_type(op, name, bounds, at::kLong);
  check_dim(op, name, bounds, 1);
  TORCH_CHECK_VALUE(bounds.sym_size(0) >= least, op, ": ", name, " must have at least ", least,
                    least == 1 ? " element" : " elements", ", got ", bounds.sym_size(0));
}

// inverse [T, K], or inverse [R] and token_offsets [T + 1]. Returns T.
inline c10::SymInt check_slots(const char* op, const Tensor& inverse,
                               const OptionalTensor& token_offsets, const Tensor& like) {
  check_device(op, "inverse", inverse, like);
  check_type(op, "inverse", inverse, at::kLong);
  check_dim(op, "inverse", inverse, token_offsets ? 1 : 2);
  if (!token_offsets) return inverse.sym_size(0);
  check_bounds(op, "token_offsets", *token_offsets, like, 1);
  return token_offsets->sym_size(0) - 1;
}

// The type of sums and of everything after the logits: float32 for the half types.
inline at::ScalarType accumulate_type(const Tensor& tensor) {
  return at::toOpMathType(tensor.scalar_type());
}

inline void check_noisy_topk_gating(const char* op, const Tensor& clean_logits,
                                    const OptionalTensor& raw_noise_stddev,
                                    const OptionalTensor& noise, const c10::SymInt& k,
                                    double noise_epsilon) {
  check_dim(op, "clean_logits", clean_logits, 2);
  check_floating(op, "clean_logits", clean_logits);
  const auto num_experts = clean_logits.sym_size(1);
  TORCH_CHECK_VALUE(k >= 1 && k <= num_experts, op,
                    ": k must be between 1 and num_experts = ", num_experts, ", got ", k);
  TORCH_CHECK_VALUE(noise_epsilon >= 0, op, ": noise_epsilon must be at least 0, got ",
                    noise_epsilon);
  TORCH_CHECK_VALUE(raw_noise_stddev.has_value() == noise.has_value(), op,
                    ": raw_noise_stddev and noise must be given together, got only ",
                    noise.has_value() ? "noise" : "raw_noise_stddev");
  if (noise) {
    const auto type = clean_logits.scalar_type();
    const auto shape = clean_logits.sym_sizes();
    check_argument(op, "raw_noise_stddev", *raw_noise_stddev, clean_logits, type, shape);
    check_argument(op, "noise", *noise, clean_logits, type, shape);
  }
}

inline void check_noisy_topk_gating_backward(
    const OptionalTensor& grad_gates, const OptionalTensor& grad_threshold,
    const OptionalTensor& grad_noise_stddev, const Tensor& gates, const Tensor& expert_index,
    const Tensor& threshold_index, const Tensor& clean_logits,
    const OptionalTensor& raw_noise_stddev, const OptionalTensor& noise) {
  constexpr auto op = "_noisy_topk_gating_backward";
  check_dim(op, "gates", gates, 2);
  const auto k = gates.sym_size(1);
  check_noisy_topk_gating(op, clean_logits, raw_noise_stddev, noise, k, 0);
  const auto num_tokens = clean_logits.sym_size(0);
  const auto real = accumulate_type(clean_logits);
  const auto check = [&](const char* name, const OptionalTensor& tensor, at::ScalarType type,
                         const c10::SymInt& columns) {
    if (tensor) check_argument(op, name, *tensor, clean_logits, type, {num_tokens, columns});
  };
  check("grad_gates", grad_gates, real, k);
  check("grad_threshold", grad_threshold, real, 2);
  if (noise) check("grad_noise_stddev", grad_noise_stddev, real, clean_logits.sym_size(1));
  check("gates", gates, real, k);
  check("expert_index", expert_index, at::kLong, k);
  check("threshold_index", threshold_index, at::kLong, 2);
}

inline void check_load(const char* op, const Tensor& clean_logits, const Tensor& noise_stddev,
                       const Tensor& threshold, const Tensor& expert_index,
                       const OptionalTensor& group_offsets) {
  check_dim(op, "clean_logits", clean_logits, 2);
  check_floating(op, "clean_logits", clean_logits);
  const auto type = accumulate_type(clean_logits);
  const auto num_tokens = clean_logits.sym_size(0);
  check_argument(op, "noise_stddev", noise_stddev, clean_logits, type, clean_logits.sym_sizes());
  check_argument(op, "threshold", threshold, clean_logits, type, {num_tokens, 2});
  check_dim(op, "expert_index", expert_index, 2);
  check_argument(op, "expert_index", expert_index, clean_logits, at::kLong,
                 {num_tokens, expert_index.sym_size(1)});
  if (group_offsets) check_bounds(op, "group_offsets", *group_offsets, clean_logits, 2);
}

// [E], or [G, E] for the rows' G groups.
inline c10::SymDimVector load_shape(const Tensor& clean_logits,
                                    const OptionalTensor& group_offsets) {
  if (!group_offsets) return {clean_logits.sym_size(1)};
  return {group_offsets->sym_size(0) - 1, clean_logits.sym_size(1)};
}

inline void check_load_backward(const Tensor& grad_load, const Tensor& clean_logits,
                                const Tensor& noise_stddev, const Tensor& threshold,
                                const Tensor& expert_index, const OptionalTensor& group_offsets) {
  constexpr auto op = "_load_backward";
  check_load(op, clean_logits, noise_stddev, threshold, expert_index, group_offsets);
  check_argument(op, "grad_load", grad_load, clean_logits, accumulate_type(clean_logits),
                 load_shape(clean_logits, group_offsets));
}

inline void check_batchwise_topm(const Tensor& scores, const c10::SymInt& first_expert,
                                 const std::optional<c10::SymInt>& num_experts) {
  constexpr auto op = "batchwise_topm";
  check_dim(op, "scores", scores, 3);
  check_floating(op, "scores", scores);
  const auto all = num_experts.value_or(scores.sym_size(2));
  TORCH_CHECK_VALUE(first_expert >= 0 && first_expert <= all - scores.sym_size(2), op,
                    ": first_expert must be at least 0 and leave ", scores.sym_size(2), " of ", all,
                    " experts, got ", first_expert);
}

// Left to the kernels: of sizes that are not known yet it cannot be shown.
inline void check_m(const Tensor& scores, int64_t m) {
  TORCH_CHECK_VALUE(m >= 0 && m <= scores.size(1),
                    "batchwise_topm: m must be between 0 and the number of rows = ", scores.size(1),
                    ", got ", m);
}

inline void check_selected_softmax(const Tensor& logits, const Tensor& expert_index,
                                   const Tensor& token_offsets) {
  constexpr auto op = "selected_softmax";
  check_dim(op, "logits", logits, 2);
  check_floating(op, "logits", logits);
  check_dim(op, "expert_index", expert_index, 1);
  check_argument(op, "expert_index", expert_index, logits, at::kLong, expert_index.sym_sizes());
  check_argument(op, "token_offsets", token_offsets, logits, at::kLong, {logits.sym_size(0) + 1});
}

inline void check_num_experts(const char* op, const c10::SymInt& num_experts) {
  TORCH_CHECK_VALUE(num_experts >= 1, op, ": num_experts must be at least 1, got ", num_experts);
}

inline void check_selected_softmax_backward(const Tensor& grad_gates, const Tensor& gates,
                                            const Tensor& expert_index, const Tensor& token_offsets,
                                            const c10::SymInt& num_experts) {
  constexpr auto op = "_selected_softmax_backward";
  check_dim(op, "gates", gates, 1);
  check_floating(op, "gates", gates);
  check_type(op, "gates", gates, accumulate_type(gates));
  check_argument(op, "grad_gates", grad_gates, gates, gates.scalar_type(), gates.sym_sizes());
  check_argument(op, "expert_index", expert_index, gates, at::kLong, gates.sym_sizes());
  check_bounds(op, "token_offsets", token_offsets, gates, 1);
  check_num_experts(op, num_experts);
}

inline void check_importance(const Tensor& gates, const Tensor& expert_index,
                             const c10::SymInt& num_experts) {
  constexpr auto op = "importance";
  check_dim(op, "gates", gates, 2);
  check_floating(op, "gates", gates);
  check_argument(op, "expert_index", expert_index, gates, at::kLong, gates.sym_sizes());
  check_num_experts(op, num_experts);
}

inline void check_dispatch_plan(const Tensor& expert_index, const c10::SymInt& num_experts) {
  constexpr auto op = "dispatch_plan";
  TORCH_CHECK_VALUE(expert_index.dim() == 1 || expert_index.dim() == 2, op,
                    ": expert_index must have 1 or 2 dimensions, got shape ",
                    expert_index.sym_sizes());
  check_type(op, "expert_index", expert_index, at::kLong);
  TORCH_CHECK_VALUE(num_experts >= 0, op, ": num_experts must be at least 0, got ", num_experts);
}

inline void check_dispatch(const Tensor& x, const Tensor& inverse,
                           const OptionalTensor& token_offsets) {
  constexpr auto op = "dispatch";
  check_dim(op, "x", x, 2);
  check_floating(op, "x", x);
  check_shape(op, "x", x, {check_slots(op, inverse, token_offsets, x), x.sym_size(1)});
}

// Returns T.
inline c10::SymInt check_dispatch_backward(const Tensor& grad_rows, const Tensor& inverse,
                                           const OptionalTensor& token_offsets) {
  constexpr auto op = "_dispatch_backward";
  check_dim(op, "grad_rows", grad_rows, 2);
  check_floating(op, "grad_rows", grad_rows);
  const auto num_tokens = check_slots(op, inverse, token_offsets, grad_rows);
  check_shape(op, "grad_rows", grad_rows, {inverse.sym_numel(), grad_rows.sym_size(1)});
  return num_tokens;
}

// Returns T.
inline c10::SymInt check_combine(const char* op, const Tensor& expert_output, const Tensor& gates,
                                 const Tensor& inverse, const OptionalTensor& token_offsets) {
  check_dim(op, "expert_output", expert_output, 2);
  check_floating(op, "expert_output", expert_output);
  check_device(op, "gates", gates, expert_output);
  check_floating(op, "gates", gates);
  const auto num_tokens = check_slots(op, inverse, token_offsets, expert_output);
  check_shape(op, "gates", gates, inverse.sym_sizes());
  check_shape(op, "expert_output", expert_output, {inverse.sym_numel(), expert_output.sym_size(1)});
  return num_tokens;
}

inline void check_combine_backward(const Tensor& grad_y, const Tensor& expert_output,
                                   const Tensor& gates, const Tensor& inverse,
                                   const OptionalTensor& token_offsets) {
  constexpr auto op = "_combine_backward";
  const auto num_tokens = check_combine(op, expert_output, gates, inverse, token_offsets);
  check_argument(op, "grad_y", grad_y, expert_output, expert_output.scalar_type(),
                 {num_tokens, expert_output.sym_size(1)});
}

// Returns whether the activation is a gated one, which takes twice its width.
inline bool check_activation(const char* op, std::string_view activation) {
  std::optional<bool> gated;
  math::for_each_activation([&](std::string_view name, auto each) {
    if (name == activation) gated = each.kGated;
  });
  if (gated) return *gated;
  std::string names;
  math::for_each_activation(
      [&](std::string_view name, auto) { names.append(names.empty() ? "" : ", ").append(name); });
  TORCH_CHECK_VALUE(false, op, ": activation must be one of ", names, ", got '", activation, "'");
}

inline void check_experts(const char* op, const Tensor& x, const OptionalTensor& offsets,
                          const OptionalTensor& inverse, const OptionalTensor& token_offsets,
                          const OptionalTensor& gates, at::TensorList weights,
                          at::TensorList biases, std::string_view activation) {
  check_dim(op, "x", x, 2);
  check_floating(op, "x", x);
  const bool gated = check_activation(op, activation);
  TORCH_CHECK_VALUE(!weights.empty() && (biases.empty() || biases.size() == weights.size()), op,
                    ": weights and biases must be one for each linear layer, at least one, got ",
                    weights.size(), " weights and ", biases.size(), " biases");
  const auto type = x.scalar_type();
  check_dim(op, "weights[0]", weights[0], 3);
  const auto num_experts = weights[0].sym_size(0);
  c10::SymInt width = x.sym_size(1);
  for (size_t l = 0; l < weights.size(); ++l) {
    const auto name = [&](const char* list) { return c10::str(list, "[", l, "]"); };
    check_dim(op, name("weights").c_str(), weights[l], 3);
    const auto columns = weights[l].sym_size(2);
    check_argument(op, name("weights").c_str(), weights[l], x, type, {num_experts, width, columns});
    if (!biases.empty()) {
      check_argument(op, name("biases").c_str(), biases[l], x, type, {num_experts, columns});
    }
    const bool halved = gated && l + 1 < weights.size();
    TORCH_CHECK_VALUE(!halved || columns % 2 == 0, op, ": weights[", l,
                      "] must have an even number of columns before ", activation, ", got ",
                      columns);
    width = halved ? columns / 2 : columns;
  }
  TORCH_CHECK_VALUE(inverse || (!token_offsets && !gates), op,
                    ": inverse must be given with token_offsets and gates, got None");
  c10::SymInt num_rows = x.sym_size(0);
  if (inverse) {
    check_shape(op, "x", x, {check_slots(op, *inverse, token_offsets, x), x.sym_size(1)});
    num_rows = inverse->sym_numel();
  }
  if (gates) {
    check_device(op, "gates", *gates, x);
    check_floating(op, "gates", *gates);
    check_shape(op, "gates", *gates, inverse->sym_sizes());
  }
  if (offsets) {
    check_argument(op, "offsets", *offsets, x, at::kLong, {num_experts + 1});
    TORCH_CHECK_VALUE(num_experts > 0 || num_rows == 0, op,
                      ": offsets must be of an expert at least where there are rows, got none for ",
                      num_rows, " rows");
  } else {
    TORCH_CHECK_VALUE(num_experts > 0 && num_rows % num_experts == 0, op,
                      ": the number of rows must be a multiple of num_experts = ", num_experts,
                      " where offsets are None, got ", num_rows);
  }
}

// The number of rows that go out: [T] with gates, else [R].
inline c10::SymInt experts_num_outputs(const Tensor& x, const OptionalTensor& inverse,
                                       const OptionalTensor& gates) {
  return inverse && !gates ? inverse->sym_numel() : x.sym_size(0);
}

inline void check_experts_backward(const Tensor& grad_y, const Tensor& x,
                                   const OptionalTensor& offsets, const OptionalTensor& inverse,
                                   const OptionalTensor& token_offsets, const OptionalTensor& gates,
                                   at::TensorList weights, at::TensorList biases,
                                   at::TensorList hidden, std::string_view activation) {
  constexpr auto op = "_experts_backward";
  check_experts(op, x, offsets, inverse, token_offsets, gates, weights, biases, activation);
  const auto type = x.scalar_type();
  check_argument(op, "grad_y", grad_y, x, type,
                 {experts_num_outputs(x, inverse, gates), weights.back().sym_size(2)});
  TORCH_CHECK_VALUE(hidden.empty() || hidden.size() + 1 == weights.size(), op,
                    ": hidden must be none, or one for each hidden layer, got ", hidden.size());
  const auto num_rows = inverse ? inverse->sym_numel() : x.sym_size(0);
  for (size_t l = 0; l < hidden.size(); ++l) {
    check_argument(op, "hidden", hidden[l], x, type, {num_rows, weights[l].sym_size(2)});
  }
}

// A number that a kernel may read where it is: on the host or beside the tensors it acts on.
inline void check_scalar(const char* op, const char* name, const Tensor& scalar,
                         const Tensor& like) {
  if (!scalar.device().is_cpu()) check_device(op, name, scalar, like);
  check_type(op, name, scalar, at::kDouble);
  check_dim(op, name, scalar, 0);
}

inline void check_factored_step(const Tensor& param, const Tensor& grad, const Tensor& row,
                                const Tensor& column, const Tensor& lr, const Tensor& correction,
                                double decay, double gain, double eps) {
  constexpr auto op = "factored_step_";
  TORCH_CHECK_VALUE(param.dim() >= 2, op, ": param must have at least 2 dimensions, got shape ",
                    param.sym_sizes());
  check_floating(op, "param", param);
  check_argument(op, "grad", grad, param, param.scalar_type(), param.sym_sizes());
  const auto type = accumulate_type(param);
  std::vector<c10::SymInt> shape = param.sym_sizes().vec();
  const auto num_columns = shape.back();
  shape.pop_back();
  check_argument(op, "row", row, param, type, shape);
  shape.back() = num_columns;
  check_argument(op, "column", column, param, type, shape);
  for (const auto& [name, tensor] :
       {std::pair{"param", &param}, {"row", &row}, {"column", &column}}) {
    TORCH_CHECK_VALUE(at::has_internal_overlap(*tensor) != at::MemOverlap::Yes, op, ": ", name,
                      " must have a place in memory for each element, got strides ",
                      tensor->sym_strides());
  }
  check_scalar(op, "lr", lr, param);
  check_scalar(op, "correction", correction, param);
  for (const auto& [name, value] : {std::pair{"decay", decay}, {"gain", gain}}) {
    TORCH_CHECK_VALUE(value >= 0, op, ": ", name, " must be at least 0, got ", value);
  }
  const double in_type = type == at::kDouble ? eps : static_cast<float>(eps);
  TORCH_CHECK_VALUE(in_type > 0, op, ": eps must be positive in the type of row, got ", eps);
}

}  // namespace moe_ext
