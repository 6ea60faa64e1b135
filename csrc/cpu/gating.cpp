// Noisy top-k gating (Sec. 2.1, Eqs. 3-5) on the CPU.
#include "../kernels/gating.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "../math/gating.h"
#include "../math/softplus.h"
#include "elementwise.h"
#include "parallel.h"
#include "select.h"
#include "vectorize.h"

namespace moe_ext {
namespace cpu {
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

}  // namespace
}  // namespace cpu
using namespace cpu;

template <typename scalar_t>
void NoisyTopKGating<scalar_t>::on_cpu() const {
  const bool noisy = noise != nullptr;
  const int64_t num_kept = std::min(k + 1, num_experts);

  parallel_for(num_tokens, 4 * num_experts, [&](int64_t begin, int64_t end) {
    std::vector<acc_t> noisy_logits(num_experts);
    std::vector<Ranked<acc_t>> kept;
    for (int64_t t = begin; t < end; ++t) {
      const auto* clean = clean_logits + t * num_experts;
      if (noisy) {
        vectorized<AddNoise>(clean, raw_noise_stddev + t * num_experts, noise + t * num_experts,
                             static_cast<acc_t>(noise_epsilon), num_experts,
                             noise_stddev + t * num_experts, noisy_logits.data());
      } else {
        vectorized<Convert>(clean, num_experts, noisy_logits.data());
      }
      select<acc_t>(noisy_logits.data(), num_experts, num_kept, kept);
      vectorized<SoftmaxOfKept>(static_cast<const Ranked<acc_t>*>(kept.data()), k, gates + t * k);
      for (int64_t j = 0; j < k; ++j) expert_index[t * k + j] = kept[j].index;
      // kth_excluding (App. A): H_(k) for an expert outside the top k, H_(k+1) for an expert inside
      // it.
      const Ranked<acc_t> none{-std::numeric_limits<acc_t>::infinity(), -1};
      const Ranked<acc_t> next = num_kept > k ? kept[k] : none;
      threshold[2 * t] = kept[k - 1].value;
      threshold[2 * t + 1] = next.value;
      threshold_index[2 * t] = kept[k - 1].index;
      threshold_index[2 * t + 1] = next.index;
    }
  });
}
MOE_EXT_DEFINE_RUN_ON_CPU(NoisyTopKGating)

template <typename scalar_t>
void NoisyTopKGatingBackward<scalar_t>::on_cpu() const {
  const bool noisy = noise != nullptr;
  parallel_for(num_tokens, 4 * num_experts, [&](int64_t begin, int64_t end) {
    std::vector<acc_t> grad_noisy(k);
    for (int64_t t = begin; t < end; ++t) {
      auto* clean = grad_clean_logits + t * num_experts;
      auto* raw = noisy ? grad_raw_noise_stddev + t * num_experts : nullptr;
      std::fill_n(clean, num_experts, scalar_t(0));
      if (noisy && grad_noise_stddev != nullptr) {
        vectorized<SoftplusBackward>(raw_noise_stddev + t * num_experts,
                                     grad_noise_stddev + t * num_experts, num_experts, raw);
      } else if (noisy) {
        std::fill_n(raw, num_experts, scalar_t(0));
      }
      auto add = [&](int64_t expert, acc_t grad) {
        clean[expert] = static_cast<scalar_t>(static_cast<acc_t>(clean[expert]) + grad);
        if (!noisy) return;
        const int64_t at = t * num_experts + expert;
        const acc_t slope = math::sigmoid(static_cast<acc_t>(raw_noise_stddev[at]));
        raw[expert] = static_cast<scalar_t>(static_cast<acc_t>(raw[expert]) +
                                            grad * static_cast<acc_t>(noise[at]) * slope);
      };
      std::fill(grad_noisy.begin(), grad_noisy.end(), acc_t(0));
      if (grad_gates != nullptr) {
        const auto* g = gates + t * k;
        const auto* v = grad_gates + t * k;
        acc_t mean = 0;
        for (int64_t j = 0; j < k; ++j) mean += g[j] * v[j];
        for (int64_t j = 0; j < k; ++j)
          grad_noisy[j] = math::noisy_logit_gradient(g[j], v[j], mean);
      }
      acc_t grad_next = 0;
      if (grad_threshold != nullptr) {
        grad_noisy[k - 1] += grad_threshold[2 * t];
        grad_next = grad_threshold[2 * t + 1];
      }
      for (int64_t j = 0; j < k; ++j) add(expert_index[t * k + j], grad_noisy[j]);
      const int64_t next = threshold_index[2 * t + 1];
      if (next >= 0) add(next, grad_next);
    }
  });
}
MOE_EXT_DEFINE_RUN_ON_CPU(NoisyTopKGatingBackward)

}  // namespace moe_ext
