// Noisy top-k gating (Sec. 2.1, Eqs. 3-5) on CUDA; one warp per token.

#include <limits>

#include "../kernels/gating.h"
#include "../math/gating.h"
#include "../math/softplus.h"
#include "launch.cuh"
#include "select.cuh"

namespace moe_ext {
namespace cuda {
namespace {

// The order is the CPU's: larger values first, NaN last, ties by the lower index. A warp finds up
// to kWarp of the k + 1 first experts in each pass over the logits.
template <typename scalar_t, typename acc_t>
__global__ void gating_kernel(const scalar_t* __restrict__ clean_logits,
                              const scalar_t* __restrict__ raw_noise_stddev,
                              const scalar_t* __restrict__ all_noise, acc_t epsilon,
                              int64_t num_tokens, unsigned num_experts, int64_t k, acc_t* gates,
                              int64_t* expert_index, acc_t* threshold, int64_t* threshold_index,
                              acc_t* noise_stddev) {
  const unsigned lane = threadIdx.x % kWarp;
  const int64_t token = index_of_warp();
  if (token >= num_tokens) return;  // uniform over the warp

  const bool noisy = all_noise != nullptr;
  const int64_t row = token * num_experts;
  const scalar_t* clean = clean_logits + row;
  const scalar_t* raw = noisy ? raw_noise_stddev + row : nullptr;
  const scalar_t* noise = noisy ? all_noise + row : nullptr;
  acc_t* stddev = noisy ? noise_stddev + row : nullptr;

  // Eq. 4; reads stddev.
  const auto noisy_logit = [&](int64_t i) {
    const acc_t value = static_cast<acc_t>(clean[i]);
    return noisy ? math::noisy_logit(value, static_cast<acc_t>(noise[i]), stddev[i]) : value;
  };
  const auto key_of = [&](unsigned i) {
    if (noisy) stddev[i] = math::softplus(static_cast<acc_t>(raw[i])) + epsilon;
    return math::order_key(noisy_logit(i));
  };

  int64_t* chosen = expert_index + token * k;
  const bool has_next = k < num_experts;
  const auto last = find_first(
      has_next ? k + 1 : k, 0, num_experts, key_of, [](unsigned) { return true; },
      [&](int64_t rank, unsigned size, const auto& candidate) {
        if (lane < size && rank + lane < k) chosen[rank + lane] = candidate.index;
      });
  __syncwarp();  // makes the writes of all lanes visible

  // Eqs. 3 and 5: the softmax over the kept values.
  acc_t* gate = gates + token * k;
  const acc_t largest = noisy_logit(chosen[0]);
  const acc_t sum = sum_in_order<acc_t>(k, [&](int64_t j) {
    return gate[j] = math::unnormalized_gate(noisy_logit(chosen[j]), largest);
  });
  for (int64_t j = lane; j < k; j += kWarp) gate[j] /= sum;  // each lane its own gates

  // kth_excluding (App. A): H_(k) for an expert outside the top k, H_(k+1) for an expert inside it.
  if (lane == 0) {
    const int64_t kth = chosen[k - 1];
    threshold[2 * token] = noisy_logit(kth);
    threshold[2 * token + 1] =
        has_next ? noisy_logit(last.index) : -std::numeric_limits<acc_t>::infinity();
    threshold_index[2 * token] = kth;
    threshold_index[2 * token + 1] = has_next ? static_cast<int64_t>(last.index) : -1;
  }
}

// dL/dH_a = g_a (v_a - sum_b g_b v_b) for the kept a, plus the gradients of the thresholds H_(k)
// and H_(k+1). dL/dclean = dL/dH; dL/dstddev = noise dL/dH + grad_noise_stddev. One warp per token;
// the experts of a token are distinct.
template <typename scalar_t, typename acc_t>
__global__ void gating_backward_kernel(
    const acc_t* __restrict__ grad_gates, const acc_t* __restrict__ grad_threshold,
    const acc_t* __restrict__ grad_noise_stddev, const acc_t* __restrict__ gates,
    const int64_t* __restrict__ expert_index, const int64_t* __restrict__ threshold_index,
    const scalar_t* __restrict__ raw_noise_stddev, const scalar_t* __restrict__ all_noise,
    int64_t num_tokens, int64_t num_experts, int64_t k, scalar_t* grad_clean_logits,
    scalar_t* grad_raw_noise_stddev) {
  const int lane = threadIdx.x % kWarp;
  const int64_t token = index_of_warp();
  if (token >= num_tokens) return;  // uniform over the warp

  const bool noisy = all_noise != nullptr;
  const int64_t row = token * num_experts;
  const scalar_t* raw = noisy ? raw_noise_stddev + row : nullptr;
  const scalar_t* noise = noisy ? all_noise + row : nullptr;
  const acc_t* grad_stddev =
      noisy && grad_noise_stddev != nullptr ? grad_noise_stddev + row : nullptr;
  scalar_t* grad_clean = grad_clean_logits + row;
  scalar_t* grad_raw = noisy ? grad_raw_noise_stddev + row : nullptr;

  const auto slope = [&](int64_t i) { return math::sigmoid(static_cast<acc_t>(raw[i])); };
  for (int64_t i = lane; i < num_experts; i += kWarp) {
    grad_clean[i] = static_cast<scalar_t>(acc_t(0));
    if (!noisy) continue;
    grad_raw[i] =
        static_cast<scalar_t>(grad_stddev != nullptr ? grad_stddev[i] * slope(i) : acc_t(0));
  }
  __syncwarp();
  const auto add = [&](int64_t expert, acc_t grad) {
    grad_clean[expert] = static_cast<scalar_t>(static_cast<acc_t>(grad_clean[expert]) + grad);
    if (!noisy) return;
    grad_raw[expert] =
        static_cast<scalar_t>(static_cast<acc_t>(grad_raw[expert]) +
                              grad * static_cast<acc_t>(noise[expert]) * slope(expert));
  };

  const acc_t* gate = gates + token * k;
  const acc_t* grad_gate = grad_gates != nullptr ? grad_gates + token * k : nullptr;
  const acc_t mean = grad_gate == nullptr ? acc_t(0) : sum_in_order<acc_t>(k, [&](int64_t j) {
    return gate[j] * grad_gate[j];
  });
  for (int64_t j = lane; j < k; j += kWarp) {
    acc_t grad = 0;
    if (grad_gate != nullptr) grad = math::noisy_logit_gradient(gate[j], grad_gate[j], mean);
    if (grad_threshold != nullptr && j == k - 1) grad += grad_threshold[2 * token];
    add(expert_index[token * k + j], grad);
  }
  const int64_t next = threshold_index[2 * token + 1];
  if (lane == 0 && next >= 0) {
    add(next, grad_threshold != nullptr ? grad_threshold[2 * token + 1] : acc_t(0));
  }
}

}  // namespace
}  // namespace cuda
using namespace cuda;

template <typename scalar_t>
void NoisyTopKGating<scalar_t>::on_cuda(const CudaStream& stream) const {
  check_countable("noisy_topk_gating", "clean_logits", num_experts);
  launch_warps(stream, gating_kernel<scalar_t, acc_t>, num_tokens, clean_logits, raw_noise_stddev,
               noise, static_cast<acc_t>(noise_epsilon), num_tokens, num_experts, k, gates,
               expert_index, threshold, threshold_index, noise_stddev);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(NoisyTopKGating)

template <typename scalar_t>
void NoisyTopKGatingBackward<scalar_t>::on_cuda(const CudaStream& stream) const {
  launch_warps(stream, gating_backward_kernel<scalar_t, acc_t>, num_tokens, grad_gates,
               grad_threshold, grad_noise_stddev, gates, expert_index, threshold_index,
               raw_noise_stddev, noise, num_tokens, num_experts, k, grad_clean_logits,
               grad_raw_noise_stddev);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(NoisyTopKGatingBackward)

}  // namespace moe_ext
