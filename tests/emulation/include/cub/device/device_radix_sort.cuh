#pragma once

#include <numeric>

#include "emulation.h"

namespace cub {

struct DeviceRadixSort {
  template <typename Key, typename Value>
  static cudaError_t SortPairs(void* space, size_t& num_bytes, const Key* keys, Key* sorted_keys,
                               const Value* values, Value* sorted_values, int64_t size,
                               int begin_bit, int end_bit, cudaStream_t) {
    if (space == nullptr) {
      num_bytes = 1;
      return cudaSuccess;
    }
    const uint64_t mask = ~uint64_t(0) >> (64 - (end_bit - begin_bit));
    const auto bits = [&](int64_t i) { return static_cast<uint64_t>(keys[i]) >> begin_bit & mask; };
    std::vector<int64_t> order(size);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return bits(a) < bits(b); });
    for (int64_t i = 0; i < size; ++i) {
      sorted_keys[i] = keys[order[i]];
      sorted_values[i] = values[order[i]];
    }
    return cudaSuccess;
  }
};

}  // namespace cub
