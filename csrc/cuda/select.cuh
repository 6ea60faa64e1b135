// Selects the first elements of a row in the order of the top k: larger keys first, then lower
// indices. One warp per row.
#pragma once

#include <cstdint>
#include <limits>

#include "../math/order.h"
#include "launch.cuh"

namespace moe_ext::cuda {

// An element of a row, with its key.
template <typename key_t>
struct Candidate {
  key_t key;
  unsigned index;

  // In the order of the top k. Keys of numbers are below the largest key_t.
  static __device__ Candidate before_all() { return {std::numeric_limits<key_t>::max(), 0}; }
  static __device__ Candidate after_all() {
    return {std::numeric_limits<key_t>::min(), std::numeric_limits<unsigned>::max()};
  }
  __device__ bool precedes(const Candidate& other) const {
    return key > other.key || (key == other.key && index < other.index);
  }
  // Returns the candidate of another lane. All lanes call it.
  __device__ Candidate of_lane(unsigned lane) const {
    return {__shfl_sync(kAllLanes, key, lane), __shfl_sync(kAllLanes, index, lane)};
  }
};

// Finds the first `count` elements of [begin, end) after `last`, at most kWarp, in one pass. Lane l
// receives the l-th of them, and `last` becomes the last of them. If there are fewer, the rest is
// after_all(). Lane l calls may_enter, then key_of, for begin + l, begin + l + kWarp, ...
//
// The lanes hold the best candidates of the elements so far, in order. Few elements of a long row
// are better than the last one. Of kWarp elements the best enter first, so that at most `count` of
// them enter, in whatever order the row is.
template <typename key_t, typename KeyOf, typename MayEnter>
__device__ __forceinline__ Candidate<key_t> find_next(unsigned count, unsigned begin, unsigned end,
                                                      const KeyOf& key_of,
                                                      const MayEnter& may_enter,
                                                      Candidate<key_t>& last) {
  constexpr unsigned kAtOnce = 4;  // per lane, so that several loads are under way
  const unsigned lane = threadIdx.x % kWarp;
  auto mine = Candidate<key_t>::after_all(), worst = mine;
  for (unsigned first = begin; first < end; first += kAtOnce * kWarp) {
    Candidate<key_t> next[kAtOnce];
#pragma unroll
    for (unsigned j = 0; j < kAtOnce; ++j) {
      const unsigned i = first + j * kWarp + lane;
      next[j] = Candidate<key_t>::after_all();
      if (i < end && may_enter(i)) next[j] = {key_of(i), i};
    }
#pragma unroll
    for (unsigned j = 0; j < kAtOnce; ++j) {
      bool is_new = last.precedes(next[j]);
      while (true) {
        is_new = is_new && next[j].precedes(worst);
        if (__ballot_sync(kAllLanes, is_new) == 0) break;
        const key_t best = warp_max(is_new ? next[j].key : std::numeric_limits<key_t>::min());
        const unsigned source = __ffs(__ballot_sync(kAllLanes, is_new && next[j].key == best)) - 1;
        const auto inserted = next[j].of_lane(source);
        const auto before = mine.of_lane(lane > 0 ? lane - 1 : 0);
        if (inserted.precedes(mine)) {
          mine = lane > 0 && inserted.precedes(before) ? before : inserted;
        }
        worst = mine.of_lane(count - 1);
        is_new = is_new && lane != source;
      }
    }
  }
  last = worst;
  return mine;
}

// Finds the first `count` elements of [begin, end) and returns the last of them; see find_next. All
// lanes call take(rank, size, candidate) for each pass: lane l < size has the element rank + l.
template <typename KeyOf, typename MayEnter, typename Take>
__device__ __forceinline__ auto find_first(int64_t count, unsigned begin, unsigned end,
                                           const KeyOf& key_of, const MayEnter& may_enter,
                                           const Take& take) {
  auto last = Candidate<decltype(key_of(begin))>::before_all();
  for (int64_t rank = 0; rank < count; rank += kWarp) {
    const unsigned size = count - rank < kWarp ? static_cast<unsigned>(count - rank) : kWarp;
    const auto candidate = find_next(size, begin, end, key_of, may_enter, last);
    take(rank, size, candidate);
  }
  return last;
}

}  // namespace moe_ext::cuda
