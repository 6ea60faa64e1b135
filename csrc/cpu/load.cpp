// Load(X)_i = sum_x P(x, i) (App. A) on the CPU.
#include "../load.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "../implement.h"
#include "../math/load.h"
#include "empty_rows.h"
#include "parallel.h"
#include "vectorize.h"

namespace moe_ext::cpu {
namespace {

// One row: every expert with the threshold H_(k), then the k chosen experts with H_(k+1).
struct ProbRow {
  template <typename scalar_t, typename acc_t>
  MOE_EXT_KERNEL void run(const scalar_t* clean, const acc_t* stddev, const acc_t* threshold,
                          const int64_t* chosen, int64_t k, int64_t num_experts, acc_t* prob,
                          acc_t* sum) {
    for (int64_t i = 0; i < num_experts; ++i) {
      prob[i] = math::prob_in_top_k(static_cast<acc_t>(clean[i]), threshold[0], stddev[i]);
    }
    for (int64_t j = 0; j < k; ++j) {
      const int64_t i = chosen[j];
      prob[i] = math::prob_in_top_k(static_cast<acc_t>(clean[i]), threshold[1], stddev[i]);
    }
    for (int64_t i = 0; i < num_experts; ++i) sum[i] += prob[i];
  }
};

// Returns the bounds of the groups of rows; without group_offsets, one group has all rows.
std::vector<int64_t> group_bounds(const char* op, const OptionalTensor& group_offsets,
                                  int64_t num_tokens) {
  if (!group_offsets) return {0, num_tokens};
  const Tensor bounds = contiguous_index(*group_offsets);
  check_offsets(op, "group_offsets", bounds, num_tokens);
  const auto* data = bounds.const_data_ptr<int64_t>();
  return {data, data + bounds.numel()};
}

Tensor load_cpu(const Tensor& clean_logits, const Tensor& noise_stddev, const Tensor& threshold,
                const Tensor& expert_index, const OptionalTensor& group_offsets) {
  check_load("load", clean_logits, noise_stddev, threshold, expert_index, group_offsets);
  const int64_t num_tokens = clean_logits.size(0);
  const int64_t num_experts = clean_logits.size(1);
  const int64_t k = expert_index.size(1);
  const Tensor clean = clean_logits.contiguous();
  const Tensor stddev = noise_stddev.contiguous();
  const Tensor limits = threshold.contiguous();
  const Tensor chosen = contiguous_index(expert_index);
  check_chosen_experts("load", chosen, num_experts);
  const auto groups = group_bounds("load", group_offsets, num_tokens);
  Tensor load = load_output(empty, clean_logits, group_offsets);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, clean.scalar_type(), "load", [&] {
    using acc_t = at::opmath_type<scalar_t>;
    const auto* clean_data = clean.const_data_ptr<scalar_t>();
    const auto* stddev_data = stddev.const_data_ptr<acc_t>();
    const auto* limits_data = limits.const_data_ptr<acc_t>();
    const auto* chosen_data = chosen.const_data_ptr<int64_t>();
    sum_over_tokens<acc_t>(
        groups, 4 * num_experts, load, [&](int64_t begin, int64_t end, acc_t* sum) {
          std::vector<acc_t> prob(num_experts);
          for (int64_t t = begin; t < end; ++t) {
            vectorized<ProbRow>(clean_data + t * num_experts, stddev_data + t * num_experts,
                                limits_data + 2 * t, chosen_data + t * k, k, num_experts,
                                prob.data(), sum);
          }
        });
  });
  return load;
}

// One row of the gradient, with q_i = dL/dP_i phi(z_i) / stddev_i. The thresholds get dH_(k) = -sum
// of q over the experts outside the top k, and dH_(k+1) = -sum over the experts inside it.
struct ProbRowBackward {
  template <typename scalar_t, typename acc_t>
  MOE_EXT_KERNEL void run(const acc_t* grad_load, const scalar_t* clean, const acc_t* stddev,
                          const acc_t* threshold, const int64_t* chosen, int64_t k,
                          int64_t num_experts, acc_t* q, scalar_t* grad_clean, acc_t* grad_stddev,
                          acc_t* grad_threshold) {
    for (int64_t i = 0; i < num_experts; ++i) {
      const auto grad = math::prob_in_top_k_gradient(static_cast<acc_t>(clean[i]), threshold[0],
                                                     stddev[i], grad_load[i]);
      q[i] = grad.clean;
      grad_stddev[i] = grad.stddev;
    }
    acc_t inside = 0;
    for (int64_t j = 0; j < k; ++j) q[chosen[j]] = 0;
    grad_threshold[0] = -sum(q, num_experts);
    for (int64_t j = 0; j < k; ++j) {
      const int64_t i = chosen[j];
      const auto grad = math::prob_in_top_k_gradient(static_cast<acc_t>(clean[i]), threshold[1],
                                                     stddev[i], grad_load[i]);
      q[i] = grad.clean;
      grad_stddev[i] = grad.stddev;
      inside += grad.clean;
    }
    grad_threshold[1] = -inside;
    for (int64_t i = 0; i < num_experts; ++i) grad_clean[i] = static_cast<scalar_t>(q[i]);
  }
};

std::tuple<Tensor, Tensor, Tensor> load_backward_cpu(
    const Tensor& grad_load, const Tensor& clean_logits, const Tensor& noise_stddev,
    const Tensor& threshold, const Tensor& expert_index, const OptionalTensor& group_offsets) {
  check_load_backward(grad_load, clean_logits, noise_stddev, threshold, expert_index,
                      group_offsets);
  const int64_t num_tokens = clean_logits.size(0);
  const int64_t num_experts = clean_logits.size(1);
  const int64_t k = expert_index.size(1);
  const Tensor grad = grad_load.contiguous();
  const Tensor clean = clean_logits.contiguous();
  const Tensor stddev = noise_stddev.contiguous();
  const Tensor limits = threshold.contiguous();
  const Tensor chosen = contiguous_index(expert_index);
  check_chosen_experts("_load_backward", chosen, num_experts);
  const auto groups = group_bounds("_load_backward", group_offsets, num_tokens);
  const auto gradients = load_gradients(empty, clean_logits, noise_stddev, threshold);
  const auto& [grad_clean, grad_stddev, grad_threshold] = gradients;
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, clean.scalar_type(), "load_backward", [&] {
        using acc_t = at::opmath_type<scalar_t>;
        const auto* grad_data = grad.const_data_ptr<acc_t>();
        const auto* clean_data = clean.const_data_ptr<scalar_t>();
        const auto* stddev_data = stddev.const_data_ptr<acc_t>();
        const auto* limits_data = limits.const_data_ptr<acc_t>();
        const auto* chosen_data = chosen.const_data_ptr<int64_t>();
        auto* grad_clean_data = grad_clean.mutable_data_ptr<scalar_t>();
        auto* grad_stddev_data = grad_stddev.mutable_data_ptr<acc_t>();
        auto* grad_threshold_data = grad_threshold.mutable_data_ptr<acc_t>();
        parallel_for(num_tokens, 4 * num_experts, [&](int64_t begin, int64_t end) {
          std::vector<acc_t> q(num_experts);
          // The last group that begins at or before row `begin`.
          auto group = std::upper_bound(groups.begin(), groups.end(), begin) - groups.begin() - 1;
          for (int64_t t = begin; t < end; ++t) {
            while (t >= groups[group + 1]) ++group;
            vectorized<ProbRowBackward>(
                grad_data + group * num_experts, clean_data + t * num_experts,
                stddev_data + t * num_experts, limits_data + 2 * t, chosen_data + t * k, k,
                num_experts, q.data(), grad_clean_data + t * num_experts,
                grad_stddev_data + t * num_experts, grad_threshold_data + 2 * t);
          }
        });
      });
  return gradients;
}

}  // namespace
}  // namespace moe_ext::cpu

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  moe_ext::implement<"load", &moe_ext::cpu::load_cpu>(m);
  moe_ext::implement<"_load_backward", &moe_ext::cpu::load_backward_cpu>(m);
}
