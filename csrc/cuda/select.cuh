// Selects the first elements of a row by its keys; one warp per row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "../math/order.h"
#include "launch.cuh"

namespace moe_ext::cuda {

// The blocks of a launch in which every warp selects from the keys of one row. The keys are in
// shared memory, unless only a few warps of a block would fit.
struct SelectionBlocks {
  explicit SelectionBlocks(int64_t key_bytes) : keys_in_shared(key_bytes <= kMostKeyBytes) {
    if (keys_in_shared) {
      num_warps = std::min(num_warps, kSharedBytes / key_bytes);
      shared_bytes = num_warps * key_bytes;
    }
  }

  static constexpr int64_t kSharedBytes = 48 << 10;   // per block
  static constexpr int64_t kMostKeyBytes = 16 << 10;  // per row; more would allow too few warps

  bool keys_in_shared;
  int64_t num_warps = kThreads / kWarp;  // per block
  int64_t shared_bytes = 0;              // per block
};

// Finds the first element of [begin, end) after (last_key, last_index) in the order of the top k:
// larger keys first, then lower indices. Every lane receives its key and index. Lane l calls key_of
// and may_enter for begin + l, begin + l + kWarp, ...
//
// With a key above all numbers as last_key, it is the first element. If there is none, the index is
// not valid.
template <typename key_t, typename KeyOf, typename MayEnter>
__device__ __forceinline__ void find_next(unsigned begin, unsigned end, const KeyOf& key_of,
                                          const MayEnter& may_enter, key_t& last_key,
                                          unsigned& last_index) {
  constexpr unsigned kNone = std::numeric_limits<unsigned>::max();
  key_t best_key = std::numeric_limits<key_t>::min();
  unsigned best_index = kNone;
  for (unsigned i = begin + threadIdx.x % kWarp; i < end; i += kWarp) {
    if (!may_enter(i)) continue;
    const key_t key = key_of(i);
    const bool comes_after = key < last_key || (key == last_key && i > last_index);
    if (comes_after && (key > best_key || best_index == kNone)) {
      best_key = key;
      best_index = i;
    }
  }
  last_key = warp_max(best_key);
  last_index = __reduce_min_sync(kAllLanes, best_key == last_key ? best_index : kNone);
}

}  // namespace moe_ext::cuda
