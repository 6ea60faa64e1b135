#pragma once

#include "emulation.h"

namespace cub {

template <typename T, unsigned kThreads>
class BlockScan {
 public:
  struct TempStorage {
    T values[kThreads];
  };

  explicit BlockScan(TempStorage& storage) : values_(storage.values) {}

  void ExclusiveSum(T value, T& before, T& all) {
    if (blockDim.x != kThreads) emulation::fail("BlockScan: the block must have kThreads threads");
    values_[threadIdx.x] = value;
    __syncthreads();
    before = all = 0;
    for (unsigned t = 0; t < kThreads; ++t) {
      if (t == threadIdx.x) before = all;
      all += values_[t];
    }
  }

  void ExclusiveSum(T value, T& before) {
    T all;
    ExclusiveSum(value, before, all);
  }

 private:
  T* values_;
};

}  // namespace cub
