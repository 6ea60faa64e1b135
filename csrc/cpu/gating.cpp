// Noisy top-k gating (Sec. 2.1, Eqs. 3-5) on the CPU.
#include "../gating.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <limits>
#include <tuple>
#include <vector>

#include "../implement.h"
#include "../math/gating.h"
#include "../math/softplus.h"
#include "elementwise.h"
#include "empty_rows.h"
#include "parallel.h"
#include "select.h"
#include "vectorize.h"

namespace moe_ext::cpu {
namespace {

// Eq. 4 for one row: stddev = softplus(raw) + epsilon, noisy = clean + noise * stddev.
struct AddNoise {
  template <typename scalar_t, typename acc_t>
  MOE_EXT_KERNEL void run(const scalar_t* clean, const scalar_t* raw, const scalar_t* noise,
                          acc_t epsilon, int64_t size, acc_t* stddev, acc_t* noisy) {
    for (int64_t i = 0; i < size; ++i) {
      stddev[i] = math::softplus(static_cast<acc_t>(raw[i])) + epsilon;
      noisy[i] =
          math::noisy_logit(static_cast<acc_t>(clean[i]), static_cast<acc_t>(noise[i]), stddev[i]);
    }
  }
};

// Eqs. 3 and 5 for one row: the softmax over the first k ranked values.
struct SoftmaxOfKept {
  template <typename acc_t>
  MOE_EXT_KERNEL void run(const Ranked<acc_t>* kept, int64_t k, acc_t* gates) {
    for (int64_t j = 0; j < k; ++j)
      gates[j] = math::unnormalized_gate(kept[j].value, kept[0].value);
    acc_t sum = 0;
    for (int64_t j = 0; j < k; ++j) sum += gates[j];
    for (int64_t j = 0; j < k; ++j) gates[j] /= sum;
  }
};

template <typename scalar_t, typename acc_t>
void gating_kernel(const Tensor& clean_logits, const Tensor& raw_noise_stddev, const Tensor& noise,
                   int64_t k, double noise_epsilon, const Tensor& gates, const Tensor& expert_index,
                   const Tensor& threshold, const Tensor& threshold_index,
                   const Tensor& noise_stddev) {
  const int64_t num_tokens = clean_logits.size(0);
  const int64_t num_experts = clean_logits.size(1);
  const bool noisy = noise.defined();
  const auto* clean_data = clean_logits.const_data_ptr<scalar_t>();
  const auto* raw_data = noisy ? raw_noise_stddev.const_data_ptr<scalar_t>() : nullptr;
  const auto* noise_data = noisy ? noise.const_data_ptr<scalar_t>() : nullptr;
  auto* stddev_data = noise_stddev.mutable_data_ptr<acc_t>();
  auto* gates_data = gates.mutable_data_ptr<acc_t>();
  auto* index_data = expert_index.mutable_data_ptr<int64_t>();
  auto* threshold_data = threshold.mutable_data_ptr<acc_t>();
  auto* threshold_index_data = threshold_index.mutable_data_ptr<int64_t>();
  const int64_t num_kept = std::min(k + 1, num_experts);

  parallel_for(num_tokens, 4 * num_experts, [&](int64_t begin, int64_t end) {
    std::vector<acc_t> noisy_logits(num_experts);
    std::vector<Ranked<acc_t>> kept;
    for (int64_t t = begin; t < end; ++t) {
      const auto* clean = clean_data + t * num_experts;
      if (noisy) {
        vectorized<AddNoise>(clean, raw_data + t * num_experts, noise_data + t * num_experts,
                             static_cast<acc_t>(noise_epsilon), num_experts,
                             stddev_data + t * num_experts, noisy_logits.data());
      } else {
        vectorized<Convert>(clean, num_experts, noisy_logits.data());
      }
      select<acc_t>(noisy_logits.data(), num_experts, num_kept, kept);
      vectorized<SoftmaxOfKept>(static_cast<const Ranked<acc_t>*>(kept.data()), k,
                                gates_data + t * k);
      for (int64_t j = 0; j < k; ++j) index_data[t * k + j] = kept[j].index;
      // kth_excluding (App. A): H_(k) for an expert outside the top k, H_(k+1) for an expert inside
      // it.
      const Ranked<acc_t> none{-std::numeric_limits<acc_t>::infinity(), -1};
      const Ranked<acc_t> next = num_kept > k ? kept[k] : none;
      threshold_data[2 * t] = kept[k - 1].value;
      threshold_data[2 * t + 1] = next.value;
      threshold_index_data[2 * t] = kept[k - 1].index;
      threshold_index_data[2 * t + 1] = next.index;
    }
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> noisy_topk_gating_cpu(
    const Tensor& clean_logits, const OptionalTensor& raw_noise_stddev, const OptionalTensor& noise,
    int64_t k, double noise_epsilon) {
  check_noisy_topk_gating("noisy_topk_gating", clean_logits, raw_noise_stddev, noise, k,
                          noise_epsilon);
  const auto outputs = noisy_topk_gating_outputs(empty, clean_logits, noise, k);
  const auto& [gates, expert_index, threshold, threshold_index, noise_stddev] = outputs;
  const Tensor clean = clean_logits.contiguous();
  const Tensor raw = contiguous(raw_noise_stddev);
  const Tensor drawn = contiguous(noise);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, clean.scalar_type(), "noisy_topk_gating", [&] {
        using acc_t = at::opmath_type<scalar_t>;
        gating_kernel<scalar_t, acc_t>(clean, raw, drawn, k, noise_epsilon, gates, expert_index,
                                       threshold, threshold_index, noise_stddev);
      });
  return outputs;
}

// d raw = d stddev * softplus'(raw) for one row.
struct SoftplusBackward {
  template <typename scalar_t, typename acc_t>
  MOE_EXT_KERNEL void run(const scalar_t* raw, const acc_t* grad_stddev, int64_t size,
                          scalar_t* grad_raw) {
    for (int64_t i = 0; i < size; ++i) {
      grad_raw[i] =
          static_cast<scalar_t>(grad_stddev[i] * math::sigmoid(static_cast<acc_t>(raw[i])));
    }
  }
};

// dL/dH_a = g_a (v_a - sum_b g_b v_b) for the kept a, plus the gradients of the thresholds H_(k)
// and H_(k+1). dL/dclean = dL/dH; dL/dstddev = noise dL/dH + grad_noise_stddev.
template <typename scalar_t, typename acc_t>
void gating_backward_kernel(const Tensor& grad_gates, const Tensor& grad_threshold,
                            const Tensor& grad_noise_stddev, const Tensor& gates,
                            const Tensor& expert_index, const Tensor& threshold_index,
                            const Tensor& raw_noise_stddev, const Tensor& noise,
                            const Tensor& grad_clean, const Tensor& grad_raw) {
  const int64_t num_tokens = grad_clean.size(0);
  const int64_t num_experts = grad_clean.size(1);
  const int64_t k = gates.size(1);
  const auto data = [](const Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr<acc_t>() : nullptr;
  };
  const auto* grad_gates_data = data(grad_gates);
  const auto* grad_threshold_data = data(grad_threshold);
  const auto* grad_stddev_data = data(grad_noise_stddev);
  const auto* gates_data = gates.const_data_ptr<acc_t>();
  const auto* index_data = expert_index.const_data_ptr<int64_t>();
  const auto* threshold_index_data = threshold_index.const_data_ptr<int64_t>();
  const bool noisy = noise.defined();
  const auto* raw_data = noisy ? raw_noise_stddev.const_data_ptr<scalar_t>() : nullptr;
  const auto* noise_data = noisy ? noise.const_data_ptr<scalar_t>() : nullptr;
  auto* grad_clean_data = grad_clean.mutable_data_ptr<scalar_t>();
  auto* grad_raw_data = noisy ? grad_raw.mutable_data_ptr<scalar_t>() : nullptr;

  parallel_for(num_tokens, 4 * num_experts, [&](int64_t begin, int64_t end) {
    std::vector<acc_t> grad_noisy(k);
    for (int64_t t = begin; t < end; ++t) {
      auto* clean = grad_clean_data + t * num_experts;
      auto* raw = noisy ? grad_raw_data + t * num_experts : nullptr;
      std::fill_n(clean, num_experts, scalar_t(0));
      if (noisy && grad_stddev_data != nullptr) {
        vectorized<SoftplusBackward>(raw_data + t * num_experts, grad_stddev_data + t * num_experts,
                                     num_experts, raw);
      } else if (noisy) {
        std::fill_n(raw, num_experts, scalar_t(0));
      }
      auto add = [&](int64_t expert, acc_t grad) {
        clean[expert] = static_cast<scalar_t>(static_cast<acc_t>(clean[expert]) + grad);
        if (!noisy) return;
        const int64_t at = t * num_experts + expert;
        const acc_t slope = math::sigmoid(static_cast<acc_t>(raw_data[at]));
        raw[expert] = static_cast<scalar_t>(static_cast<acc_t>(raw[expert]) +
                                            grad * static_cast<acc_t>(noise_data[at]) * slope);
      };
      std::fill(grad_noisy.begin(), grad_noisy.end(), acc_t(0));
      if (grad_gates_data != nullptr) {
        const auto* g = gates_data + t * k;
        const auto* v = grad_gates_data + t * k;
        acc_t mean = 0;
        for (int64_t j = 0; j < k; ++j) mean += g[j] * v[j];
        for (int64_t j = 0; j < k; ++j)
          grad_noisy[j] = math::noisy_logit_gradient(g[j], v[j], mean);
      }
      acc_t grad_next = 0;
      if (grad_threshold_data != nullptr) {
        grad_noisy[k - 1] += grad_threshold_data[2 * t];
        grad_next = grad_threshold_data[2 * t + 1];
      }
      for (int64_t j = 0; j < k; ++j) add(index_data[t * k + j], grad_noisy[j]);
      const int64_t next = threshold_index_data[2 * t + 1];
      if (next >= 0) add(next, grad_next);
    }
  });
}

std::tuple<Tensor, Tensor> noisy_topk_gating_backward_cpu(
    const OptionalTensor& grad_gates, const OptionalTensor& grad_threshold,
    const OptionalTensor& grad_noise_stddev, const Tensor& gates, const Tensor& expert_index,
    const Tensor& threshold_index, const Tensor& clean_logits,
    const OptionalTensor& raw_noise_stddev, const OptionalTensor& noise) {
  constexpr auto op = "_noisy_topk_gating_backward";
  check_noisy_topk_gating_backward(grad_gates, grad_threshold, grad_noise_stddev, gates,
                                   expert_index, threshold_index, clean_logits, raw_noise_stddev,
                                   noise);
  const Tensor chosen = contiguous_index(expert_index);
  const Tensor limits = contiguous_index(threshold_index);
  check_index_range(op, "expert_index", chosen, clean_logits.size(1));
  check_index_range(op, "threshold_index", limits, clean_logits.size(1), /*least=*/-1);
  const auto gradients = noisy_topk_gating_gradients(empty, clean_logits, noise);
  const auto& [grad_clean, grad_raw] = gradients;
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, clean_logits.scalar_type(), "noisy_topk_gating_backward", [&] {
        using acc_t = at::opmath_type<scalar_t>;
        gating_backward_kernel<scalar_t, acc_t>(contiguous(grad_gates), contiguous(grad_threshold),
                                                contiguous(grad_noise_stddev), gates.contiguous(),
                                                chosen, limits, contiguous(raw_noise_stddev),
                                                contiguous(noise), grad_clean, grad_raw);
      });
  return gradients;
}

}  // namespace
}  // namespace moe_ext::cpu

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  moe_ext::implement<"noisy_topk_gating", &moe_ext::cpu::noisy_topk_gating_cpu>(m);
  moe_ext::implement<"_noisy_topk_gating_backward", &moe_ext::cpu::noisy_topk_gating_backward_cpu>(
      m);
}
