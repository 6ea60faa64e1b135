// Load(X)_i = sum_x P(x, i) (App. A) on the CPU.
#include "../kernels/load.h"

#include <algorithm>
#include <vector>

#include "../math/load.h"
#include "parallel.h"
#include "vectorize.h"

namespace moe_ext {
namespace cpu {
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

std::vector<int64_t> bounds_of(const RowGroups& groups) {
  if (groups.bounds == nullptr) return {0, groups.num_rows};
  return {groups.bounds, groups.bounds + groups.num_groups + 1};
}

}  // namespace
}  // namespace cpu
using namespace cpu;

template <typename scalar_t>
void Load<scalar_t>::on_cpu() const {
  const auto bounds = bounds_of(groups);
  sum_over_tokens<acc_t>(bounds.data(), groups.num_groups, num_experts, 4 * num_experts, load,
                         [&](int64_t begin, int64_t end, acc_t* sum) {
                           std::vector<acc_t> prob(num_experts);
                           for (int64_t t = begin; t < end; ++t) {
                             vectorized<ProbRow>(clean_logits + t * num_experts,
                                                 noise_stddev + t * num_experts, threshold + 2 * t,
                                                 expert_index + t * k, k, num_experts, prob.data(),
                                                 sum);
                           }
                         });
}
MOE_EXT_DEFINE_RUN_ON_CPU(Load)

template <typename scalar_t>
void LoadBackward<scalar_t>::on_cpu() const {
  const auto bounds = bounds_of(groups);
  parallel_for(groups.num_rows, 4 * num_experts, [&](int64_t begin, int64_t end) {
    std::vector<acc_t> q(num_experts);
    // The last group that begins at or before row `begin`.
    auto group = std::upper_bound(bounds.begin(), bounds.end(), begin) - bounds.begin() - 1;
    for (int64_t t = begin; t < end; ++t) {
      while (t >= bounds[group + 1]) ++group;
      const int64_t row = t * num_experts;
      vectorized<ProbRowBackward>(grad_load + group * num_experts, clean_logits + row,
                                  noise_stddev + row, threshold + 2 * t, expert_index + t * k, k,
                                  num_experts, q.data(), grad_clean_logits + row,
                                  grad_noise_stddev + row, grad_threshold + 2 * t);
    }
  });
}
MOE_EXT_DEFINE_RUN_ON_CPU(LoadBackward)

}  // namespace moe_ext
