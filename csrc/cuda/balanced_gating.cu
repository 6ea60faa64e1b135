// Strictly balanced gating (App. F) on CUDA: the batchwise mask, and the softmax over the selected
// experts.

#include <cub/block/block_scan.cuh>
#include <limits>
#include <type_traits>

#include "../kernels/balanced_gating.h"
#include "../math/balanced_gating.h"
#include "../math/gating.h"
#include "launch.cuh"

namespace moe_ext {
namespace cuda {
namespace {

// order_key as an unsigned number; the radix search processes it digit by digit.
template <typename acc_t>
using UnsignedKey = std::make_unsigned_t<decltype(math::order_key(acc_t()))>;

template <typename key_t>
constexpr key_t kSignBit = key_t(1) << (8 * sizeof(key_t) - 1);

// Computes the keys of scores [G, N, E] as [G, E, N]; a block transposes kWarp x kWarp of them.
template <typename scalar_t, typename key_t>
__global__ void keys_kernel(const scalar_t* __restrict__ scores, int64_t num_rows,
                            int64_t num_experts, key_t* __restrict__ keys) {
  using acc_t = acc_type<scalar_t>;
  __shared__ key_t tile[kWarp][kWarp + 1];  // + 1: the elements of a column are in different banks
  const int64_t row_tiles = ceil_div(num_rows, kWarp);
  const int64_t column_tiles = ceil_div(num_experts, kWarp);
  const int64_t group = blockIdx.x / (row_tiles * column_tiles);
  const int64_t first_row = blockIdx.x / column_tiles % row_tiles * kWarp;
  const int64_t first_column = blockIdx.x % column_tiles * kWarp;
  const int lane = threadIdx.x % kWarp;
  for (int r = threadIdx.x / kWarp; r < kWarp; r += kThreads / kWarp) {
    const int64_t row = first_row + r;
    const int64_t column = first_column + lane;
    if (row < num_rows && column < num_experts) {
      const auto score =
          static_cast<acc_t>(scores[(group * num_rows + row) * num_experts + column]);
      tile[r][lane] = static_cast<key_t>(math::order_key(score)) ^ kSignBit<key_t>;
    }
  }
  __syncthreads();
  for (int c = threadIdx.x / kWarp; c < kWarp; c += kThreads / kWarp) {
    const int64_t row = first_row + lane;
    const int64_t column = first_column + c;
    if (row < num_rows && column < num_experts) {
      keys[(group * num_experts + column) * num_rows + row] = tile[lane][c];
    }
  }
}

constexpr int kColumnThreads = 512;
constexpr int kDigitBits = 8;
constexpr unsigned kDigits = 1u << kDigitBits;

using CountScan = cub::BlockScan<unsigned, kColumnThreads>;
using PairScan = cub::BlockScan<uint64_t, kColumnThreads>;

struct SelectSpace {
  union {
    typename CountScan::TempStorage counts;
    typename PairScan::TempStorage pairs;
  } scan;
  unsigned num_with_digit[kDigits];
  unsigned digit, num_larger, num_equal;
};

// The rank-th largest key, how many keys equal to it are among the rank largest, and how many keys
// equal it in total.
template <typename key_t>
struct Cut {
  key_t key;
  unsigned num_taken;
  unsigned num_equal;
};

// Searches from the highest digit: counts the next digits of the keys that match the digits found
// so far. The function key_at(row, &key) returns whether the row takes part; at least `rank` >= 1
// rows must.
template <typename key_t, typename KeyAt>
__device__ Cut<key_t> find_cut(unsigned num_rows, unsigned rank, const KeyAt& key_at,
                               SelectSpace& space) {
  const unsigned thread = threadIdx.x;
  Cut<key_t> cut{0, rank, 0};
  for (int shift = 8 * sizeof(key_t) - kDigitBits; shift >= 0; shift -= kDigitBits) {
    for (unsigned d = thread; d < kDigits; d += kColumnThreads) space.num_with_digit[d] = 0;
    __syncthreads();
    for (unsigned row = thread; row < num_rows; row += kColumnThreads) {
      key_t key = 0;
      if (key_at(row, &key) && (key ^ cut.key) >> shift >> kDigitBits == 0) {
        atomicAdd(&space.num_with_digit[key >> shift & (kDigits - 1)], 1u);
      }
    }
    __syncthreads();
    const unsigned digit = kDigits - 1 - thread;  // threads from kDigits on have no digit
    const unsigned count = thread < kDigits ? space.num_with_digit[digit] : 0;
    unsigned num_larger = 0;
    CountScan(space.scan.counts).ExclusiveSum(count, num_larger);
    if (num_larger < cut.num_taken && cut.num_taken <= num_larger + count) {  // true in one thread
      space.digit = digit;
      space.num_larger = num_larger;
      space.num_equal = count;
    }
    __syncthreads();
    cut.key |= static_cast<key_t>(space.digit) << shift;
    cut.num_taken -= space.num_larger;
    cut.num_equal = space.num_equal;
  }
  return cut;
}

// Writes the first m rows of one column of keys [G * E, N], ascending, and the score of the m-th
// largest key. One block per column. In tie_break, the first column of group g has the index
// first_column + g * columns_of_group.
template <typename scalar_t, typename key_t>
__global__ void __launch_bounds__(kColumnThreads)
    topm_kernel(const key_t* __restrict__ all_keys, unsigned num_rows, int64_t num_experts,
                unsigned m, int64_t first_column, int64_t columns_of_group,
                int64_t* __restrict__ row_index, scalar_t* __restrict__ mth_score) {
  constexpr unsigned kRowsOfThread = 4;
  __shared__ SelectSpace space;
  const int64_t column = blockIdx.x;
  const key_t* keys = all_keys + column * num_rows;
  const auto tie_column = static_cast<uint32_t>(column / num_experts * columns_of_group +
                                                first_column + column % num_experts);

  const auto key_at = [&](unsigned row, key_t* key) {
    *key = keys[row];
    return true;
  };
  const Cut<key_t> cut = find_cut<key_t>(num_rows, m, key_at, space);
  if (threadIdx.x == 0) {
    const auto key = static_cast<std::make_signed_t<key_t>>(cut.key ^ kSignBit<key_t>);
    mth_score[column] = static_cast<scalar_t>(math::number_of_key(key));
  }
  const bool tied = cut.num_equal > cut.num_taken;
  Cut<unsigned> tie_cut{0, 0, 0};
  if (tied) {  // uniform over the block
    const auto tie_at = [&](unsigned row, unsigned* key) {
      *key = static_cast<unsigned>(math::tie_break(tie_column, row));
      return keys[row] == cut.key;
    };
    tie_cut = find_cut<unsigned>(num_rows, cut.num_taken, tie_at, space);
  }

  // 1 for a row above both cuts, 2^32 for a row at the last cut. The lowest rows at the last cut
  // are taken.
  constexpr uint64_t kAbove = 1, kAtCut = uint64_t(1) << 32;
  const auto kind_of = [&](unsigned row) -> uint64_t {
    const key_t key = keys[row];
    if (key != cut.key) return key > cut.key ? kAbove : 0;
    if (!tied) return kAbove;
    const auto tie = static_cast<unsigned>(math::tie_break(tie_column, row));
    if (tie != tie_cut.key) return tie > tie_cut.key ? kAbove : 0;
    return kAtCut;
  };
  uint64_t num_before = 0;  // the counts of both kinds in the previous tiles
  for (unsigned first = 0; first < num_rows; first += kColumnThreads * kRowsOfThread) {
    uint64_t kinds[kRowsOfThread];
    uint64_t num_mine = 0;
    for (unsigned r = 0; r < kRowsOfThread; ++r) {
      const unsigned row = first + threadIdx.x * kRowsOfThread + r;
      kinds[r] = row < num_rows ? kind_of(row) : 0;
      num_mine += kinds[r];
    }
    uint64_t before = 0, num_in_tile = 0;
    PairScan(space.scan.pairs).ExclusiveSum(num_mine, before, num_in_tile);
    before += num_before;
    for (unsigned r = 0; r < kRowsOfThread; ++r) {
      const auto num_above = static_cast<unsigned>(before);
      const auto num_at_cut = static_cast<unsigned>(before >> 32);
      if (kinds[r] == kAbove || (kinds[r] == kAtCut && num_at_cut < tie_cut.num_taken)) {
        const unsigned place = num_above + min(num_at_cut, tie_cut.num_taken);
        row_index[column * m + place] = first + threadIdx.x * kRowsOfThread + r;
      }
      before += kinds[r];
    }
    num_before += num_in_tile;
    __syncthreads();  // the next scan reuses the space
  }
}

// Computes the softmax over the selected logits of each token; one warp per token.
template <typename scalar_t, typename acc_t>
__global__ void selected_softmax_kernel(const scalar_t* __restrict__ all_logits,
                                        const int64_t* __restrict__ expert_index,
                                        const int64_t* __restrict__ token_offsets,
                                        int64_t num_tokens, int64_t num_experts,
                                        acc_t* __restrict__ all_gates) {
  const int lane = threadIdx.x % kWarp;
  const int64_t token = index_of_warp();
  if (token >= num_tokens) return;  // uniform over the warp
  const int64_t begin = token_offsets[token];
  const int64_t size = token_offsets[token + 1] - begin;
  const scalar_t* logits = all_logits + token * num_experts;
  const int64_t* selected = expert_index + begin;
  acc_t* gates = all_gates + begin;
  acc_t largest = -std::numeric_limits<acc_t>::infinity();
  for (int64_t s = lane; s < size; s += kWarp) {
    const acc_t logit = static_cast<acc_t>(logits[selected[s]]);
    gates[s] = logit;
    largest = logit > largest ? logit : largest;
  }
  largest = warp_max(largest);
  const acc_t sum = sum_in_order<acc_t>(
      size, [&](int64_t s) { return gates[s] = math::unnormalized_gate(gates[s], largest); });
  for (int64_t s = lane; s < size; s += kWarp) gates[s] /= sum;
}

// dL/dlogit_i = G_i (v_i - sum_a G_a v_a) for each selected expert i, with v = dL/dG; 0 for the
// other experts. One warp per token; each lane owns every kWarp-th expert and adds in slot order.
template <typename scalar_t>
__global__ void selected_softmax_backward_kernel(const scalar_t* __restrict__ grad_gates,
                                                 const scalar_t* __restrict__ gates,
                                                 const int64_t* __restrict__ expert_index,
                                                 const int64_t* __restrict__ token_offsets,
                                                 int64_t num_tokens, int64_t num_experts,
                                                 scalar_t* __restrict__ grad_logits) {
  const int lane = threadIdx.x % kWarp;
  const int64_t token = index_of_warp();
  if (token >= num_tokens) return;  // uniform over the warp
  const int64_t begin = token_offsets[token];
  const int64_t end = token_offsets[token + 1];
  scalar_t* row = grad_logits + token * num_experts;
  for (int64_t i = lane; i < num_experts; i += kWarp) row[i] = 0;
  const scalar_t mean = sum_in_order<scalar_t>(
      end - begin, [&](int64_t s) { return gates[begin + s] * grad_gates[begin + s]; });
  for (int64_t first = begin; first < end; first += kWarp) {
    const int count = end - first < kWarp ? static_cast<int>(end - first) : kWarp;
    const int64_t s = first + lane;
    const int64_t expert = lane < count ? expert_index[s] : 0;
    const scalar_t grad =
        lane < count ? math::noisy_logit_gradient(gates[s], grad_gates[s], mean) : scalar_t(0);
    for (int l = 0; l < count; ++l) {
      const int64_t of_slot = __shfl_sync(kAllLanes, expert, l);
      const scalar_t to_add = __shfl_sync(kAllLanes, grad, l);
      if (of_slot % kWarp == lane) row[of_slot] += to_add;
    }
  }
}

}  // namespace
}  // namespace cuda
using namespace cuda;

template <typename scalar_t>
void BatchwiseTopM<scalar_t>::on_cuda(const CudaStream& stream) const {
  check_countable("batchwise_topm", "scores", num_rows);
  using key_t = UnsignedKey<acc_type<scalar_t>>;
  auto* keys = stream.take<key_t>(num_groups * num_experts * num_rows);
  launch_blocks(stream, keys_kernel<scalar_t, key_t>,
                num_groups * ceil_div(num_rows, kWarp) * ceil_div(num_experts, kWarp), scores,
                num_rows, num_experts, keys);
  launch(stream, topm_kernel<scalar_t, key_t>, num_groups * num_experts, kColumnThreads, 0, keys,
         num_rows, num_experts, m, first_expert, columns_of_batch, row_index, mth_score);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(BatchwiseTopM)

template <typename scalar_t>
void SelectedSoftmax<scalar_t>::on_cuda(const CudaStream& stream) const {
  launch_warps(stream, selected_softmax_kernel<scalar_t, acc_type<scalar_t>>, num_tokens, logits,
               expert_index, token_offsets, num_tokens, num_experts, gates);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(SelectedSoftmax)

template <typename scalar_t>
void SelectedSoftmaxBackward<scalar_t>::on_cuda(const CudaStream& stream) const {
  launch_warps(stream, selected_softmax_backward_kernel<scalar_t>, num_tokens, grad_gates, gates,
               expert_index, token_offsets, num_tokens, num_experts, grad_logits);
}
MOE_EXT_DEFINE_ON_CUDA(SelectedSoftmaxBackward<float>)
MOE_EXT_DEFINE_ON_CUDA(SelectedSoftmaxBackward<double>)

}  // namespace moe_ext
