// Scores, group-limited selection and gates of the top k on the CPU.
#include "../kernels/topk_routing.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "../math/topk_routing.h"
#include "elementwise.h"
#include "parallel.h"
#include "select.h"
#include "vectorize.h"

namespace moe_ext {
namespace cpu {
namespace {

// The shift and the denominator of the softmax over all logits of a row.
template <typename acc_t>
struct Total {
  acc_t shift = 0;
  acc_t denominator = 1;
};

// weights_i = e^(l_i - shift) for one row of logits, with its largest logit as the shift.
struct SoftmaxWeights {
  template <typename acc_t>
  MOE_EXT_KERNEL void run(const acc_t* logits, int64_t size, acc_t* weights, Total<acc_t>* total) {
    const acc_t shift = largest_of(logits, size);
    for (int64_t i = 0; i < size; ++i) weights[i] = math::SoftmaxScore::value(logits[i], shift);
    *total = {shift, sum(weights, size)};
  }
};

// scores_i = value_i / denominator + bias_i for one row; a softmax has its weights as values.
template <typename Score>
struct BiasedScores {
  template <typename acc_t>
  MOE_EXT_KERNEL void run(const acc_t* logits, const acc_t* bias, int64_t size, acc_t denominator,
                          acc_t* scores) {
    for (int64_t i = 0; i < size; ++i) {
      scores[i] = Score::kSoftmax ? scores[i] / denominator : Score::value(logits[i], acc_t(0));
    }
    if (bias == nullptr) return;
    for (int64_t i = 0; i < size; ++i) scores[i] += bias[i];
  }
};

// The score of each group of `size` experts: the sum of its score_k largest scores, in descending
// order. NaN counts as -infinity. `space` has score_k * kBlock numbers.
struct GroupScores {
  static constexpr int64_t kBlock = 8;  // groups in the lanes of a vector

  template <typename acc_t>
  MOE_EXT_KERNEL void run(const acc_t* scores, int64_t num_groups, int64_t size, int64_t score_k,
                          acc_t* space, acc_t* group_scores) {
    typedef acc_t Vector __attribute__((vector_size(kBlock * sizeof(acc_t))));
    const Vector lowest = Vector{} - std::numeric_limits<acc_t>::infinity();
    for (int64_t first = 0; first < num_groups; first += kBlock) {
      const acc_t* group[kBlock];  // the last block repeats the last group
      for (int64_t b = 0; b < kBlock; ++b) {
        group[b] = scores + std::min(first + b, num_groups - 1) * size;
      }
      // Each lane inserts the scores of its group into a sorted list.
      const auto place = [&](int64_t j) { return space + j * kBlock; };
      for (int64_t j = 0; j < score_k; ++j) std::memcpy(place(j), &lowest, sizeof(Vector));
      for (int64_t i = 0; i < size; ++i) {
        Vector value{group[0][i], group[1][i], group[2][i], group[3][i],
                     group[4][i], group[5][i], group[6][i], group[7][i]};
        value = value == value ? value : lowest;
        for (int64_t j = 0; j < score_k; ++j) {
          Vector old;
          std::memcpy(&old, place(j), sizeof(Vector));
          const Vector larger = old > value ? old : value;
          value = old > value ? value : old;
          std::memcpy(place(j), &larger, sizeof(Vector));
        }
      }
      Vector sum{};
      for (int64_t j = 0; j < score_k; ++j) {
        Vector value;
        std::memcpy(&value, place(j), sizeof(Vector));
        sum += value;
      }
      for (int64_t b = 0; b < std::min(kBlock, num_groups - first); ++b) {
        group_scores[first + b] = sum[b];
      }
    }
  }
};

// The weights w of the chosen logits, and the denominator of the gates; `total` has shift and
// denominator of all logits.
template <typename Score>
struct WeightsOfChosen {
  template <typename acc_t>
  MOE_EXT_KERNEL void run(const acc_t* logits, int64_t k, bool renormalize, Total<acc_t> total,
                          acc_t* weights, acc_t* denominator) {
    acc_t shift = total.shift;
    if (Score::kSoftmax && renormalize) {
      shift = logits[0];
      for (int64_t j = 1; j < k; ++j) shift = logits[j] > shift ? logits[j] : shift;
    }
    for (int64_t j = 0; j < k; ++j) weights[j] = Score::value(logits[j], shift);
    *denominator = total.denominator;
    if (!renormalize) return;
    acc_t sum = 0;
    for (int64_t j = 0; j < k; ++j) sum += weights[j];
    *denominator = math::renormalizer<Score>(sum);
  }
};

template <typename Score>
struct Gates {
  template <typename acc_t>
  MOE_EXT_KERNEL void run(const acc_t* logits, int64_t k, bool renormalize, acc_t scale,
                          Total<acc_t> total, acc_t* gates) {
    acc_t denominator;
    WeightsOfChosen<Score>::run(logits, k, renormalize, total, gates, &denominator);
    for (int64_t j = 0; j < k; ++j) gates[j] = gates[j] / denominator * scale;
  }
};

template <typename Score, typename scalar_t>
void route(const TopKRouting<scalar_t>& routing) {
  using acc_t = acc_type<scalar_t>;
  const ExpertGroups<int64_t>& groups = routing.groups;
  const bool selects = routing.selects, renormalize = routing.rule.renormalize;
  const acc_t scale = static_cast<acc_t>(routing.rule.scale);
  const int64_t num_experts = routing.num_experts, k = routing.k;
  const int64_t group_size = num_experts / groups.number;
  const bool grouped = selects && groups.number > 1;
  // Scores ascend with the logits, which do not round to ties.
  const bool by_score = grouped || (selects && routing.bias != nullptr);
  const bool needs_total = Score::kSoftmax && (by_score || !renormalize);

  parallel_for(routing.num_tokens, 4 * num_experts, [&](int64_t begin, int64_t end) {
    std::vector<acc_t> row(num_experts), scores(num_experts), group_scores(groups.number);
    std::vector<acc_t> candidates(grouped ? groups.per_token * group_size : 0), chosen(k);
    std::vector<acc_t> space(grouped ? groups.score_k * GroupScores::kBlock : 0);
    std::vector<Ranked<acc_t>> kept;
    std::vector<int64_t> chosen_groups(groups.per_token);
    for (int64_t t = begin; t < end; ++t) {
      vectorized<Convert>(routing.logits + t * num_experts, num_experts, row.data());
      Total<acc_t> total;
      if (needs_total) {
        vectorized<SoftmaxWeights>(static_cast<const acc_t*>(row.data()), num_experts,
                                   scores.data(), &total);
      }
      if (by_score) {
        vectorized<BiasedScores<Score>>(static_cast<const acc_t*>(row.data()), routing.bias,
                                        num_experts, total.denominator, scores.data());
      }
      auto* index = routing.expert_index + t * k;
      if (grouped) {
        vectorized<GroupScores>(static_cast<const acc_t*>(scores.data()), groups.number, group_size,
                                groups.score_k, space.data(), group_scores.data());
        select<acc_t>(group_scores.data(), groups.number, groups.per_token, kept);
        for (int64_t g = 0; g < groups.per_token; ++g) chosen_groups[g] = kept[g].index;
        // In ascending order, so that ties go to the lower index.
        std::sort(chosen_groups.begin(), chosen_groups.end());
        for (int64_t g = 0; g < groups.per_token; ++g) {
          std::copy_n(scores.data() + chosen_groups[g] * group_size, group_size,
                      candidates.data() + g * group_size);
        }
        select<acc_t>(candidates.data(), static_cast<int64_t>(candidates.size()), k, kept);
        for (int64_t j = 0; j < k; ++j) {
          const int64_t candidate = kept[j].index;
          index[j] = chosen_groups[candidate / group_size] * group_size + candidate % group_size;
        }
      } else if (selects) {
        select<acc_t>(by_score ? scores.data() : row.data(), num_experts, k, kept);
        for (int64_t j = 0; j < k; ++j) index[j] = kept[j].index;
      }
      for (int64_t j = 0; j < k; ++j) chosen[j] = row[index[j]];
      vectorized<Gates<Score>>(static_cast<const acc_t*>(chosen.data()), k, renormalize, scale,
                               total, routing.gates + t * k);
    }
  });
}

// The gradients of the chosen logits, from the gradients of their gates; see math/topk_routing.h.
// score_gradient computes the mean.
template <typename Score>
struct GatesBackward {
  template <typename acc_t>
  MOE_EXT_KERNEL void run(const acc_t* logits, const acc_t* grad_gates, int64_t k, bool renormalize,
                          acc_t scale, Total<acc_t> total, acc_t* weights, acc_t* grad_logits,
                          acc_t* mean) {
    acc_t denominator;
    WeightsOfChosen<Score>::run(logits, k, renormalize, total, weights, &denominator);
    *mean = 0;
    if (Score::kSoftmax || renormalize) {
      for (int64_t j = 0; j < k; ++j) *mean += weights[j] / denominator * (scale * grad_gates[j]);
    }
    for (int64_t j = 0; j < k; ++j) {
      grad_logits[j] = math::score_gradient(scale * grad_gates[j], *mean,
                                            Score::slope(logits[j], weights[j]), denominator);
    }
  }
};

// The gradients of logits that are not chosen, under a softmax over all logits.
struct OthersBackward {
  template <typename acc_t, typename scalar_t>
  MOE_EXT_KERNEL void run(const acc_t* weights, int64_t size, acc_t denominator, acc_t mean,
                          scalar_t* grad_logits) {
    for (int64_t i = 0; i < size; ++i) {
      grad_logits[i] =
          static_cast<scalar_t>(math::score_gradient(acc_t(0), mean, weights[i], denominator));
    }
  }
};

template <typename Score, typename scalar_t>
void route_backward(const TopKRoutingBackward<scalar_t>& routing) {
  using acc_t = acc_type<scalar_t>;
  const bool renormalize = routing.rule.renormalize;
  const acc_t scale = static_cast<acc_t>(routing.rule.scale);
  const int64_t num_experts = routing.num_experts, k = routing.k;
  const bool over_all = Score::kSoftmax && !renormalize;

  parallel_for(routing.num_tokens, over_all ? 4 * num_experts : num_experts,
               [&](int64_t begin, int64_t end) {
                 std::vector<acc_t> row(over_all ? num_experts : 0), weights(row.size());
                 std::vector<acc_t> chosen(k), weights_of_chosen(k), grad_chosen(k);
                 for (int64_t t = begin; t < end; ++t) {
                   const auto* from = routing.logits + t * num_experts;
                   const auto* index = routing.expert_index + t * k;
                   auto* grad = routing.grad_logits + t * num_experts;
                   Total<acc_t> total;
                   if (over_all) {
                     vectorized<Convert>(from, num_experts, row.data());
                     vectorized<SoftmaxWeights>(static_cast<const acc_t*>(row.data()), num_experts,
                                                weights.data(), &total);
                   }
                   for (int64_t j = 0; j < k; ++j) chosen[j] = static_cast<acc_t>(from[index[j]]);
                   acc_t mean;
                   vectorized<GatesBackward<Score>>(static_cast<const acc_t*>(chosen.data()),
                                                    routing.grad_gates + t * k, k, renormalize,
                                                    scale, total, weights_of_chosen.data(),
                                                    grad_chosen.data(), &mean);
                   if (over_all) {
                     vectorized<OthersBackward>(static_cast<const acc_t*>(weights.data()),
                                                num_experts, total.denominator, mean, grad);
                   } else {
                     std::fill_n(grad, num_experts, scalar_t(0));
                   }
                   for (int64_t j = 0; j < k; ++j)
                     grad[index[j]] = static_cast<scalar_t>(grad_chosen[j]);
                 }
               });
}

}  // namespace
}  // namespace cpu
using namespace cpu;

template <typename scalar_t>
void TopKRouting<scalar_t>::on_cpu() const {
  math::with_score(rule.score, [&](auto score) { route<decltype(score)>(*this); });
}
MOE_EXT_DEFINE_RUN_ON_CPU(TopKRouting)

template <typename scalar_t>
void TopKRoutingBackward<scalar_t>::on_cpu() const {
  math::with_score(rule.score, [&](auto score) { route_backward<decltype(score)>(*this); });
}
MOE_EXT_DEFINE_RUN_ON_CPU(TopKRoutingBackward)

}  // namespace moe_ext
