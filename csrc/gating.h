// noisy_topk_gating: the checks of its arguments, and its outputs.
#pragma once

#include <cmath>
#include <tuple>

#include "checks.h"

namespace moe_ext {

// `k_name` is the argument that k comes from.
inline void check_noisy_topk_gating(const char* op, const Tensor& clean_logits,
                                    const OptionalTensor& raw_noise_stddev,
                                    const OptionalTensor& noise, const c10::SymInt& k,
                                    double noise_epsilon, const char* k_name = "k") {
  check_dim(op, "clean_logits", clean_logits, 2);
  check_floating(op, "clean_logits", clean_logits);
  check_k(op, k_name, k, clean_logits.sym_size(1));
  const double in_type = in_accumulate_type(clean_logits, noise_epsilon);
  TORCH_CHECK_VALUE(
      in_type >= 0 && std::isfinite(in_type), op,
      ": noise_epsilon must be at least 0, and finite in the dtype of the gates, got ",
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

// Creates gates and expert_index [T, K], threshold and threshold_index [T, 2], and noise_stddev [T,
// E], or [0, E] without noise.
inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> noisy_topk_gating_outputs(
    Empty& empty, const Tensor& clean_logits, const OptionalTensor& noise, const c10::SymInt& k) {
  const auto num_tokens = clean_logits.sym_size(0);
  const auto real = accumulate_type(clean_logits);
  return {
      empty(clean_logits, {num_tokens, k}, real), empty(clean_logits, {num_tokens, k}, at::kLong),
      empty(clean_logits, {num_tokens, 2}, real), empty(clean_logits, {num_tokens, 2}, at::kLong),
      empty(clean_logits, {noise ? num_tokens : 0, clean_logits.sym_size(1)}, real)};
}

inline void check_noisy_topk_gating_backward(
    const OptionalTensor& grad_gates, const OptionalTensor& grad_threshold,
    const OptionalTensor& grad_noise_stddev, const Tensor& gates, const Tensor& expert_index,
    const Tensor& threshold_index, const Tensor& clean_logits,
    const OptionalTensor& raw_noise_stddev, const OptionalTensor& noise) {
  constexpr auto op = "_noisy_topk_gating_backward";
  check_dim(op, "gates", gates, 2);
  const auto k = gates.sym_size(1);
  check_noisy_topk_gating(op, clean_logits, raw_noise_stddev, noise, k, 0, "gates.size(1)");
  const auto num_tokens = clean_logits.sym_size(0);
  const auto real = accumulate_type(clean_logits);
  const auto check = [&](const char* name, const OptionalTensor& tensor,
                         const c10::SymInt& columns) {
    if (tensor) check_argument(op, name, *tensor, clean_logits, real, {num_tokens, columns});
  };
  check("grad_gates", grad_gates, k);
  check("grad_threshold", grad_threshold, 2);
  if (grad_noise_stddev) {
    check_argument(op, "grad_noise_stddev", *grad_noise_stddev, clean_logits, real,
                   {noise ? num_tokens : 0, clean_logits.sym_size(1)});
  }
  check("gates", gates, k);
  check_index(op, "expert_index", expert_index, clean_logits, {num_tokens, k});
  check_index(op, "threshold_index", threshold_index, clean_logits, {num_tokens, 2});
}

// Creates the gradients of clean_logits, [T, E], and of raw_noise_stddev, [T, E], or [0, E] without
// noise.
inline std::tuple<Tensor, Tensor> noisy_topk_gating_gradients(Empty& empty,
                                                              const Tensor& clean_logits,
                                                              const OptionalTensor& noise) {
  return {empty_of(empty, clean_logits),
          empty(clean_logits, {noise ? clean_logits.sym_size(0) : 0, clean_logits.sym_size(1)},
                clean_logits.scalar_type())};
}

}  // namespace moe_ext
