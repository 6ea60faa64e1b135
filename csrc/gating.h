// noisy_topk_gating: the host functions.
#pragma once

#include <cmath>
#include <tuple>

#include "checks.h"
#include "device.h"
#include "kernels/gating.h"

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

// Returns gates and expert_index [T, K], threshold and threshold_index [T, 2], and noise_stddev [T,
// E], or [0, E] without noise.
template <typename Device>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> noisy_topk_gating(
    const Tensor& clean_logits, const OptionalTensor& raw_noise_stddev, const OptionalTensor& noise,
    c10::SymInt k, double noise_epsilon) {
  check_noisy_topk_gating("noisy_topk_gating", clean_logits, raw_noise_stddev, noise, k,
                          noise_epsilon);
  const auto num_tokens = clean_logits.sym_size(0);
  const auto real = accumulate_type(clean_logits);
  Tensor gates = Device::empty(clean_logits, {num_tokens, k}, real);
  Tensor expert_index = Device::empty(clean_logits, {num_tokens, k}, at::kLong);
  Tensor threshold = Device::empty(clean_logits, {num_tokens, 2}, real);
  Tensor threshold_index = Device::empty(clean_logits, {num_tokens, 2}, at::kLong);
  Tensor noise_stddev =
      Device::empty(clean_logits, {noise ? num_tokens : 0, clean_logits.sym_size(1)}, real);
  Device::compute(clean_logits, [&] {
    const Tensor clean = clean_logits.contiguous(), raw = contiguous(raw_noise_stddev),
                 drawn = contiguous(noise);
    with_type(clean, [&]<typename scalar_t>() {
      using acc_t = acc_type<scalar_t>;
      Device::run(
          NoisyTopKGating<scalar_t>{.clean_logits = clean.const_data_ptr<scalar_t>(),
                                    .raw_noise_stddev = data_of<scalar_t>(raw),
                                    .noise = data_of<scalar_t>(drawn),
                                    .noise_epsilon = noise_epsilon,
                                    .num_tokens = clean.size(0),
                                    .num_experts = clean.size(1),
                                    .k = gates.size(1),
                                    .gates = gates.mutable_data_ptr<acc_t>(),
                                    .expert_index = expert_index.mutable_data_ptr<int64_t>(),
                                    .threshold = threshold.mutable_data_ptr<acc_t>(),
                                    .threshold_index = threshold_index.mutable_data_ptr<int64_t>(),
                                    .noise_stddev = noise_stddev.mutable_data_ptr<acc_t>()});
    });
  });
  return {gates, expert_index, threshold, threshold_index, noise_stddev};
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

// Returns the gradients of clean_logits, [T, E], and of raw_noise_stddev, [T, E], or [0, E] without
// noise.
template <typename Device>
std::tuple<Tensor, Tensor> noisy_topk_gating_backward(
    const OptionalTensor& grad_gates, const OptionalTensor& grad_threshold,
    const OptionalTensor& grad_noise_stddev, const Tensor& gates, const Tensor& expert_index,
    const Tensor& threshold_index, const Tensor& clean_logits,
    const OptionalTensor& raw_noise_stddev, const OptionalTensor& noise) {
  constexpr auto op = "_noisy_topk_gating_backward";
  check_noisy_topk_gating_backward(grad_gates, grad_threshold, grad_noise_stddev, gates,
                                   expert_index, threshold_index, clean_logits, raw_noise_stddev,
                                   noise);
  Tensor grad_clean = empty_of(Device::empty, clean_logits);
  Tensor grad_raw =
      Device::empty(clean_logits, {noise ? clean_logits.sym_size(0) : 0, clean_logits.sym_size(1)},
                    clean_logits.scalar_type());
  Device::compute(clean_logits, [&] {
    const Tensor chosen = contiguous_index(expert_index),
                 limits = contiguous_index(threshold_index);
    if (Device::kReadsValues) {
      check_index_range(op, "expert_index", chosen, clean_logits.size(1));
      check_index_range(op, "threshold_index", limits, clean_logits.size(1), /*least=*/-1);
    }
    const Tensor of_gates = contiguous(grad_gates), of_threshold = contiguous(grad_threshold),
                 of_stddev = contiguous(grad_noise_stddev), kept = gates.contiguous(),
                 raw = contiguous(raw_noise_stddev), drawn = contiguous(noise);
    with_type(clean_logits, [&]<typename scalar_t>() {
      using acc_t = acc_type<scalar_t>;
      Device::run(NoisyTopKGatingBackward<scalar_t>{
          .grad_gates = data_of<acc_t>(of_gates),
          .grad_threshold = data_of<acc_t>(of_threshold),
          .grad_noise_stddev = data_of<acc_t>(of_stddev),
          .gates = kept.const_data_ptr<acc_t>(),
          .expert_index = chosen.const_data_ptr<int64_t>(),
          .threshold_index = limits.const_data_ptr<int64_t>(),
          .raw_noise_stddev = data_of<scalar_t>(raw),
          .noise = data_of<scalar_t>(drawn),
          .num_tokens = grad_clean.size(0),
          .num_experts = grad_clean.size(1),
          .k = kept.size(1),
          .grad_clean_logits = grad_clean.mutable_data_ptr<scalar_t>(),
          .grad_raw_noise_stddev = grad_raw.mutable_data_ptr<scalar_t>()});
    });
  });
  return {grad_clean, grad_raw};
}

}  // namespace moe_ext
