// Scores, group-limited selection and gates of the top k on CUDA; one warp per token.

#include <limits>

#include "../kernels/topk_routing.h"
#include "../math/order.h"
#include "../math/topk_routing.h"
#include "launch.cuh"
#include "select.cuh"

namespace moe_ext {
namespace cuda {
namespace {

// The shift and the denominator of the softmax over all logits of a row; see cpu/topk_routing.cpp.
template <typename acc_t>
struct Total {
  acc_t shift = 0;
  acc_t denominator = 1;
};

template <typename scalar_t, typename acc_t>
__device__ __forceinline__ Total<acc_t> softmax_total(const scalar_t* logits, unsigned size) {
  const unsigned lane = threadIdx.x % kWarp;
  acc_t shift = -std::numeric_limits<acc_t>::infinity();
  for (unsigned i = lane; i < size; i += kWarp) {
    const acc_t logit = static_cast<acc_t>(logits[i]);
    shift = logit > shift ? logit : shift;
  }
  shift = warp_max(shift);
  acc_t sum = 0;
  for (unsigned i = lane; i < size; i += kWarp) {
    sum += math::SoftmaxScore::value(static_cast<acc_t>(logits[i]), shift);
  }
  return {shift, warp_sum(sum)};
}

// Returns the shift and the denominator of the gates of the chosen logits; `total` has both for all
// logits.
template <typename Score, typename scalar_t, typename acc_t>
__device__ __forceinline__ Total<acc_t> total_of_chosen(const scalar_t* logits,
                                                        const int64_t* chosen, int64_t k,
                                                        bool renormalize, Total<acc_t> total) {
  if (!renormalize) return total;
  if (Score::kSoftmax) {
    total.shift = static_cast<acc_t>(logits[chosen[0]]);
    for (int64_t j = 1; j < k; ++j) {
      const acc_t logit = static_cast<acc_t>(logits[chosen[j]]);
      total.shift = logit > total.shift ? logit : total.shift;
    }
  }
  total.denominator = math::renormalizer<Score>(sum_in_order<acc_t>(k, [&](int64_t j) {
    return Score::value(static_cast<acc_t>(logits[chosen[j]]), total.shift);
  }));
  return total;
}

// Computes the gates of a token's chosen experts; `total` has shift and denominator of all logits.
template <typename Score, typename scalar_t, typename acc_t>
__device__ __forceinline__ void write_gates(const scalar_t* logits, const int64_t* chosen,
                                            int64_t k, bool renormalize, acc_t scale,
                                            Total<acc_t> total, acc_t* gates) {
  total = total_of_chosen<Score, scalar_t, acc_t>(logits, chosen, k, renormalize, total);
  for (int64_t j = threadIdx.x % kWarp; j < k; j += kWarp) {
    const acc_t weight = Score::value(static_cast<acc_t>(logits[chosen[j]]), total.shift);
    gates[j] = weight / total.denominator * scale;
  }
}

// Selects the experts of a token. The keys of its groups are in shared memory or, if there are
// many, in the workspace.
template <typename Score, typename scalar_t, typename acc_t, typename key_t>
__global__ void routing_kernel(const scalar_t* __restrict__ all_logits,
                               const acc_t* __restrict__ bias, int64_t num_tokens,
                               unsigned num_experts, int64_t k, bool renormalize, acc_t scale,
                               unsigned num_groups, int64_t groups_per_token, int64_t score_k,
                               key_t* workspace, acc_t* gates, int64_t* expert_index) {
  extern __shared__ __align__(16) unsigned char shared_space[];
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned warp = threadIdx.x / kWarp;
  const int64_t token = index_of_warp();
  if (token >= num_tokens) return;  // uniform over the warp

  const bool grouped = num_groups > 1;
  key_t* group_keys = workspace != nullptr
                          ? workspace + token * num_groups
                          : reinterpret_cast<key_t*>(shared_space) + warp * num_groups;
  const scalar_t* logits = all_logits + token * num_experts;
  int64_t* chosen = expert_index + token * k;

  // Scores ascend with the logits, which do not round to ties.
  const bool by_score = grouped || bias != nullptr;
  Total<acc_t> total;
  if (Score::kSoftmax && (by_score || !renormalize)) {
    total = softmax_total<scalar_t, acc_t>(logits, num_experts);
  }
  const auto key_of = [&](unsigned i) {
    acc_t value = static_cast<acc_t>(logits[i]);
    if (by_score) value = Score::value(value, total.shift) / total.denominator;
    return math::order_key(bias == nullptr ? value : value + bias[i]);
  };

  const auto any = [](unsigned) { return true; };
  const unsigned group_size = num_experts / num_groups;
  auto last_group = Candidate<key_t>::after_all();  // of the chosen ones
  if (grouped) {
    for (unsigned g = 0; g < num_groups; ++g) {
      acc_t sum = 0;
      find_first(score_k, g * group_size, (g + 1) * group_size, key_of, any,
                 [&](int64_t, unsigned size, const auto& candidate) {
                   const acc_t score = math::number_of_key(candidate.key);
                   const acc_t value =
                       score == score ? score : -std::numeric_limits<acc_t>::infinity();
                   for (unsigned l = 0; l < size; ++l) sum += __shfl_sync(kAllLanes, value, l);
                 });
      if (lane == 0) group_keys[g] = math::order_key(sum);
    }
    __syncwarp();
    last_group = find_first(
        groups_per_token, 0, num_groups, [&](unsigned g) { return group_keys[g]; }, any,
        [](int64_t, unsigned, const auto&) {});
  }
  const auto in_chosen_group = [&](unsigned i) {
    if (!grouped) return true;
    const unsigned g = i / group_size;
    return !last_group.precedes({group_keys[g], g});
  };
  find_first(k, 0, num_experts, key_of, in_chosen_group,
             [&](int64_t rank, unsigned size, const auto& candidate) {
               if (lane < size) chosen[rank + lane] = candidate.index;
             });
  __syncwarp();  // makes the indices visible to all lanes
  write_gates<Score, scalar_t, acc_t>(logits, chosen, k, renormalize, scale, total,
                                      gates + token * k);
}

// Computes the gates of given experts; one warp per token.
template <typename Score, typename scalar_t, typename acc_t>
__global__ void given_experts_kernel(const scalar_t* __restrict__ all_logits,
                                     const int64_t* __restrict__ expert_index, int64_t num_tokens,
                                     unsigned num_experts, int64_t k, bool renormalize, acc_t scale,
                                     acc_t* gates) {
  const int64_t token = index_of_warp();
  if (token >= num_tokens) return;  // uniform over the warp
  const scalar_t* logits = all_logits + token * num_experts;
  Total<acc_t> total;
  if (Score::kSoftmax && !renormalize) total = softmax_total<scalar_t, acc_t>(logits, num_experts);
  write_gates<Score, scalar_t, acc_t>(logits, expert_index + token * k, k, renormalize, scale,
                                      total, gates + token * k);
}

// One warp per token; the experts of a token are distinct.
template <typename Score, typename scalar_t, typename acc_t>
__global__ void routing_backward_kernel(const acc_t* __restrict__ grad_gates,
                                        const scalar_t* __restrict__ all_logits,
                                        const int64_t* __restrict__ expert_index,
                                        int64_t num_tokens, unsigned num_experts, int64_t k,
                                        bool renormalize, acc_t scale, scalar_t* grad_logits) {
  const unsigned lane = threadIdx.x % kWarp;
  const int64_t token = index_of_warp();
  if (token >= num_tokens) return;  // uniform over the warp

  const scalar_t* logits = all_logits + token * num_experts;
  const int64_t* chosen = expert_index + token * k;
  const acc_t* grad_gate = grad_gates + token * k;
  scalar_t* grad = grad_logits + token * num_experts;
  const bool over_all = Score::kSoftmax && !renormalize;
  Total<acc_t> total;
  if (over_all) total = softmax_total<scalar_t, acc_t>(logits, num_experts);
  total = total_of_chosen<Score, scalar_t, acc_t>(logits, chosen, k, renormalize, total);
  const auto logit = [&](int64_t i) { return static_cast<acc_t>(logits[i]); };
  acc_t mean = 0;
  if (Score::kSoftmax || renormalize) {
    mean = sum_in_order<acc_t>(k, [&](int64_t j) {
      const acc_t weight = Score::value(logit(chosen[j]), total.shift);
      return weight / total.denominator * (scale * grad_gate[j]);
    });
  }
  for (unsigned i = lane; i < num_experts; i += kWarp) {
    acc_t other = 0;
    if (over_all) {
      const acc_t weight = Score::value(logit(i), total.shift);
      other = math::score_gradient(acc_t(0), mean, weight, total.denominator);
    }
    grad[i] = static_cast<scalar_t>(other);
  }
  __syncwarp();
  for (int64_t j = lane; j < k; j += kWarp) {
    const acc_t weight = Score::value(logit(chosen[j]), total.shift);
    grad[chosen[j]] = static_cast<scalar_t>(math::score_gradient(
        scale * grad_gate[j], mean, Score::slope(logit(chosen[j]), weight), total.denominator));
  }
}

}  // namespace
}  // namespace cuda
using namespace cuda;

template <typename scalar_t>
void TopKRouting<scalar_t>::on_cuda(const CudaStream& stream) const {
  check_countable("topk_routing", "logits", num_experts);
  const acc_t factor = static_cast<acc_t>(rule.scale);
  if (!selects) {
    return math::with_score(rule.score, [&](auto score) {
      launch_warps(stream, given_experts_kernel<decltype(score), scalar_t, acc_t>, num_tokens,
                   logits, expert_index, num_tokens, num_experts, k, rule.renormalize, factor,
                   gates);
    });
  }
  using key_t = decltype(math::order_key(acc_t()));
  constexpr int64_t kWarps = kThreads / kWarp, kSharedLimit = 48 << 10;  // of a block
  const bool grouped = groups.number > 1;
  const int64_t key_bytes = grouped ? kWarps * groups.number * sizeof(key_t) : 0;
  const bool in_shared = key_bytes <= kSharedLimit;
  auto* workspace = in_shared ? nullptr : stream.take<key_t>(num_tokens * groups.number);
  math::with_score(rule.score, [&](auto score) {
    launch(stream, routing_kernel<decltype(score), scalar_t, acc_t, key_t>,
           ceil_div(num_tokens, kWarps), kThreads, in_shared ? key_bytes : 0, logits, bias,
           num_tokens, num_experts, k, rule.renormalize, factor, groups.number, groups.per_token,
           groups.score_k, workspace, gates, expert_index);
  });
}
MOE_EXT_DEFINE_RUN_ON_CUDA(TopKRouting)

template <typename scalar_t>
void TopKRoutingBackward<scalar_t>::on_cuda(const CudaStream& stream) const {
  math::with_score(rule.score, [&](auto score) {
    launch_warps(stream, routing_backward_kernel<decltype(score), scalar_t, acc_t>, num_tokens,
                 grad_gates, logits, expert_index, num_tokens, num_experts, k, rule.renormalize,
                 static_cast<acc_t>(rule.scale), grad_logits);
  });
}
MOE_EXT_DEFINE_RUN_ON_CUDA(TopKRoutingBackward)

}  // namespace moe_ext
