// Argument checks: every message names the op, the argument, the rule and what came.
//
// Each op's checks are written once and run by every kernel, the Meta kernel included (hence
// SymInt). Values are checked only on the CPU, where reading them costs nothing.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <vector>

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

// Every element of a contiguous CPU tensor of indices must lie in [0, limit): memory depends on it.
inline void check_index_range(const char* op, const char* name, const Tensor& index,
                              int64_t limit) {
  const auto* data = index.const_data_ptr<int64_t>();
  const int64_t size = index.numel();
  bool valid = true;
  for (int64_t i = 0; i < size; ++i) {
    valid &= static_cast<uint64_t>(data[i]) < static_cast<uint64_t>(limit);
  }
  if (valid) return;
  const auto* wrong =
      std::find_if(data, data + size, [&](int64_t value) { return value < 0 || value >= limit; });
  TORCH_CHECK_INDEX(false, op, ": ", name, " must be at least 0 and below ", limit, ", got ",
                    *wrong);
}

// A contiguous CPU tensor [n + 1] of the bounds of n groups of rows.
inline void check_offsets(const char* op, const char* name, const Tensor& offsets,
                          int64_t num_rows) {
  const at::IntArrayRef bounds(offsets.const_data_ptr<int64_t>(), offsets.numel());
  TORCH_CHECK_VALUE(bounds.front() == 0 && bounds.back() == num_rows &&
                        std::is_sorted(bounds.begin(), bounds.end()),
                    op, ": ", name, " must ascend from 0 to the number of rows ", num_rows,
                    ", got ", bounds);
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

// The type of sums and of everything after the logits: float32 for the half types.
inline at::ScalarType accumulate_type(const Tensor& tensor) {
  return at::toOpMathType(tensor.scalar_type());
}

inline void check_noisy_topk_gating(const Tensor& clean_logits,
                                    const OptionalTensor& raw_noise_stddev,
                                    const OptionalTensor& noise, const c10::SymInt& k,
                                    double noise_epsilon) {
  constexpr auto op = "noisy_topk_gating";
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

inline void check_load(const Tensor& clean_logits, const Tensor& noise_stddev,
                       const Tensor& threshold, const Tensor& expert_index,
                       const OptionalTensor& group_offsets) {
  constexpr auto op = "load";
  check_dim(op, "clean_logits", clean_logits, 2);
  check_floating(op, "clean_logits", clean_logits);
  const auto type = accumulate_type(clean_logits);
  const auto num_tokens = clean_logits.sym_size(0);
  check_argument(op, "noise_stddev", noise_stddev, clean_logits, type, clean_logits.sym_sizes());
  check_argument(op, "threshold", threshold, clean_logits, type, {num_tokens, 2});
  check_dim(op, "expert_index", expert_index, 2);
  check_argument(op, "expert_index", expert_index, clean_logits, at::kLong,
                 {num_tokens, expert_index.sym_size(1)});
  if (group_offsets) {
    check_device(op, "group_offsets", *group_offsets, clean_logits);
    check_type(op, "group_offsets", *group_offsets, at::kLong);
    check_dim(op, "group_offsets", *group_offsets, 1);
    TORCH_CHECK_VALUE(group_offsets->sym_size(0) >= 2, op,
                      ": group_offsets must have at least 2 elements, got shape ",
                      group_offsets->sym_sizes());
  }
}

// [E], or [G, E] for the rows' G groups.
inline c10::SymDimVector load_shape(const Tensor& clean_logits,
                                    const OptionalTensor& group_offsets) {
  if (!group_offsets) return {clean_logits.sym_size(1)};
  return {group_offsets->sym_size(0) - 1, clean_logits.sym_size(1)};
}

inline void check_batchwise_topm(const Tensor& scores, const c10::SymInt& m) {
  constexpr auto op = "batchwise_topm";
  check_dim(op, "scores", scores, 3);
  check_floating(op, "scores", scores);
  const auto num_rows = scores.sym_size(1);
  TORCH_CHECK_VALUE(m >= 0 && m <= num_rows, op,
                    ": m must be between 0 and the number of rows = ", num_rows, ", got ", m);
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
  check_type(op, "gates", gates, accumulate_type(gates));
  check_argument(op, "grad_gates", grad_gates, gates, gates.scalar_type(), gates.sym_sizes());
  check_argument(op, "expert_index", expert_index, gates, at::kLong, gates.sym_sizes());
  check_device(op, "token_offsets", token_offsets, gates);
  check_type(op, "token_offsets", token_offsets, at::kLong);
  check_dim(op, "token_offsets", token_offsets, 1);
  TORCH_CHECK_VALUE(token_offsets.sym_size(0) >= 1, op,
                    ": token_offsets must have at least 1 element, got 0");
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
  check_dim(op, "expert_index", expert_index, 2);
  check_type(op, "expert_index", expert_index, at::kLong);
  check_num_experts(op, num_experts);
}

inline void check_dispatch(const Tensor& x, const Tensor& inverse) {
  constexpr auto op = "dispatch";
  check_dim(op, "x", x, 2);
  check_floating(op, "x", x);
  check_dim(op, "inverse", inverse, 2);
  check_argument(op, "inverse", inverse, x, at::kLong, {x.sym_size(0), inverse.sym_size(1)});
}

inline void check_combine(const Tensor& expert_output, const Tensor& gates, const Tensor& inverse) {
  constexpr auto op = "combine";
  check_dim(op, "expert_output", expert_output, 2);
  check_floating(op, "expert_output", expert_output);
  check_dim(op, "gates", gates, 2);
  check_device(op, "gates", gates, expert_output);
  check_floating(op, "gates", gates);
  check_argument(op, "inverse", inverse, expert_output, at::kLong, gates.sym_sizes());
  check_shape(op, "expert_output", expert_output, {gates.sym_numel(), expert_output.sym_size(1)});
}

inline void check_grouped_linear(const Tensor& rows, const Tensor& weight,
                                 const OptionalTensor& bias, const Tensor& offsets) {
  constexpr auto op = "grouped_linear";
  check_dim(op, "rows", rows, 2);
  check_floating(op, "rows", rows);
  check_dim(op, "weight", weight, 3);
  const auto type = rows.scalar_type();
  const auto num_experts = weight.sym_size(0);
  const auto d_output = weight.sym_size(2);
  check_argument(op, "weight", weight, rows, type, {num_experts, rows.sym_size(1), d_output});
  if (bias) check_argument(op, "bias", *bias, rows, type, {num_experts, d_output});
  check_argument(op, "offsets", offsets, rows, at::kLong, {num_experts + 1});
}

}  // namespace moe_ext
