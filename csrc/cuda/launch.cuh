// Kernel launches, and reductions over a warp or a block.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../kernels/types.h"
#include "../math/integers.h"

namespace moe_ext::cuda {

constexpr int kWarp = 32;
constexpr int kThreads = 256;  // default number of threads in a block
constexpr unsigned kAllLanes = 0xffffffffu;

// Throws std::runtime_error for an error of CUDA's runtime.
inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // later calls must not find it
  throw std::runtime_error(std::string("moe_ext: CUDA error: ") + cudaGetErrorString(error));
}

// Lets a kernel use more dynamic shared memory than the default.
template <typename Kernel>
void allow_shared_memory(Kernel* kernel, int64_t shared_bytes) {
  constexpr int64_t kDefaultLimit = 48 << 10;
  if (shared_bytes <= kDefaultLimit) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes)));
}

// Launches a kernel on a stream of the current device, unless it has no blocks.
template <typename... Parameters, typename... Arguments>
void launch(const CudaStream& stream, void (*kernel)(Parameters...), int64_t num_blocks,
            int threads, int64_t shared_bytes, Arguments... arguments) {
  if (num_blocks == 0) return;
  if (num_blocks > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("moe_ext: a kernel must have fewer than 2^31 blocks, got " +
                                std::to_string(num_blocks));
  }
  allow_shared_memory(kernel, shared_bytes);
  const auto blocks = static_cast<unsigned>(num_blocks);
  kernel<<<blocks, threads, shared_bytes, static_cast<cudaStream_t>(stream.handle)>>>(
      static_cast<Parameters>(arguments)...);
  check(cudaGetLastError());
}

// Returns the number of blocks that the current device runs at the same time, at least 1: the
// launch of a kernel that does not fit must fail.
template <typename Kernel>
int64_t resident_blocks(Kernel* kernel, int threads, int64_t shared_bytes) {
  int device = 0, multiprocessors = 0, blocks_of_each = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  allow_shared_memory(kernel, shared_bytes);
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_of_each, kernel, threads,
                                                      static_cast<size_t>(shared_bytes)));
  return std::max<int64_t>(static_cast<int64_t>(multiprocessors) * blocks_of_each, 1);
}

// Launches a kernel with a number of blocks of kThreads.
template <typename... Parameters, typename... Arguments>
void launch_blocks(const CudaStream& stream, void (*kernel)(Parameters...), int64_t num_blocks,
                   Arguments... arguments) {
  launch(stream, kernel, num_blocks, kThreads, 0, arguments...);
}

// The same with at least a number of threads, or of warps.
template <typename... Parameters, typename... Arguments>
void launch_threads(const CudaStream& stream, void (*kernel)(Parameters...), int64_t num_threads,
                    Arguments... arguments) {
  launch_blocks(stream, kernel, ceil_div(num_threads, kThreads), arguments...);
}
template <typename... Parameters, typename... Arguments>
void launch_warps(const CudaStream& stream, void (*kernel)(Parameters...), int64_t num_warps,
                  Arguments... arguments) {
  launch_blocks(stream, kernel, ceil_div(num_warps, kThreads / kWarp), arguments...);
}

// The same for a kernel that loops over a number of threads with the grid's stride.
template <typename... Parameters, typename... Arguments>
void launch_strided(const CudaStream& stream, void (*kernel)(Parameters...), int64_t num_threads,
                    Arguments... arguments) {
  constexpr int64_t kMostBlocks = 1 << 20;
  launch_blocks(stream, kernel, std::min(ceil_div(num_threads, kThreads), kMostBlocks),
                arguments...);
}

// The index of this thread, or of its warp, in the grid.
__device__ __forceinline__ int64_t index_of_thread() {
  return blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
}
__device__ __forceinline__ int64_t index_of_warp() {
  return blockIdx.x * static_cast<int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp;
}

// Checks a size that kernels count in 32 bits to save time.
inline void check_countable(const char* op, const char* name, int64_t size) {
  if (size <= std::numeric_limits<int32_t>::max()) return;
  throw std::invalid_argument(std::string(op) + ": " + name +
                              " must have fewer than 2^31 rows and columns on CUDA, got " +
                              std::to_string(size));
}

// Returns the sum over the lanes of a warp, in a fixed order, to every lane.
template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// Returns the largest value of the lanes of a warp to every lane. No value may be NaN.
template <typename T>
__device__ __forceinline__ T warp_max(T value) {
  if constexpr (std::is_same_v<T, int32_t>) {
    return __reduce_max_sync(kAllLanes, value);
  } else {
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      const T other = __shfl_xor_sync(kAllLanes, value, distance);
      value = other > value ? other : value;
    }
    return value;
  }
}

// Returns term(0) + term(1) + ..., added in this order as on the CPU: for values that must be
// bitwise identical to the CPU's. All lanes of a warp call it. Each lane computes some of the terms
// and receives the sum.
template <typename T, typename Term>
__device__ __forceinline__ T sum_in_order(int64_t size, const Term& term) {
  const int lane = threadIdx.x % kWarp;
  T sum = 0;
  for (int64_t first = 0; first < size; first += kWarp) {
    const int count = size - first < kWarp ? static_cast<int>(size - first) : kWarp;
    const T mine = lane < count ? term(first + lane) : T(0);
    for (int l = 0; l < count; ++l) sum += __shfl_sync(kAllLanes, mine, l);
  }
  return sum;
}

// Returns the sum over the threads of a block, in a fixed order, to every thread. The block size is
// a multiple of kWarp. `space` has one element per warp and can be reused after the call.
template <typename T>
__device__ __forceinline__ T block_sum(T value, T* space) {
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) space[threadIdx.x / kWarp] = value;
  __syncthreads();
  T sum = 0;
  for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) sum += space[warp];
  __syncthreads();
  return sum;
}

}  // namespace moe_ext::cuda
