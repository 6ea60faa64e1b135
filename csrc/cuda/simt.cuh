// The part of a grouped GEMM that one block computes: matrices of any type and alignment, in the
// order of sums of the CPU.
#pragma once

#include "launch.cuh"

namespace moe_ext::cuda::simt {

constexpr int kBlockTile = 64;           // rows and columns of the result
constexpr int kKTile = 16;               // depth of a k-tile
constexpr int kStride = kBlockTile + 4;  // of lines in shared memory; avoids bank conflicts
constexpr int kSide = 16;                // a block has kSide^2 threads
constexpr int kThreadTile = kBlockTile / kSide;
constexpr int kBlockThreads = kSide * kSide;
constexpr int kFragment = kBlockTile * kKTile / kBlockThreads;  // elements of an operand's k-tile
constexpr int kPartialK = 256;  // summed separately: a single long sum would round away small terms

// An operand as in tensor_core.cuh, but of any type and alignment.
template <typename scalar_t, bool kKMajor>
struct Operand {
  const scalar_t* data;  // at the first row or column of the block, k = 0
  int64_t stride;        // from one line to the next
  int64_t extent;        // the number of rows or columns from the first one on

  // The row or column, and the k, of this thread's i-th element of a k-tile; neighboring threads
  // have neighbors in a line.
  static __device__ int mn(int i) {
    const int number = threadIdx.x + i * kBlockThreads;
    return kKMajor ? number / kKTile : number % kBlockTile;
  }
  static __device__ int k(int i) {
    const int number = threadIdx.x + i * kBlockThreads;
    return kKMajor ? number % kKTile : number / kBlockTile;
  }

  // Loads the k-tile at first_k into registers; elements out of range are zero.
  __device__ void load(scalar_t (&fragment)[kFragment], int64_t first_k, int64_t size_k) const {
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      const bool inside = first_k + k(i) < size_k && mn(i) < extent;
      const int64_t line = kKMajor ? mn(i) : first_k + k(i);
      const int64_t along = kKMajor ? first_k + k(i) : mn(i);
      fragment[i] = inside ? data[line * stride + along] : scalar_t(0);
    }
  }

  template <typename acc_t>
  static __device__ void store(const scalar_t (&fragment)[kFragment], acc_t (*shared)[kStride]) {
#pragma unroll
    for (int i = 0; i < kFragment; ++i) shared[k(i)][mn(i)] = static_cast<acc_t>(fragment[i]);
  }
};

// The accumulators of a block, in the registers of its threads.
template <typename acc_t>
struct Accumulators {
  acc_t total[kThreadTile][kThreadTile] = {};
  acc_t partial[kThreadTile][kThreadTile] = {};

  // Adds a times b. While one k-tile is multiplied, the next one is loaded. All threads of the
  // block must call it.
  template <typename scalar_t, bool kKMajorA, bool kKMajorB>
  __device__ void mainloop(const Operand<scalar_t, kKMajorA>& a,
                           const Operand<scalar_t, kKMajorB>& b, int64_t size_k) {
    __shared__ acc_t a_tile[kKTile][kStride], b_tile[kKTile][kStride];
    scalar_t next_a[kFragment], next_b[kFragment];
    const auto load = [&](int64_t first_k) {
      a.load(next_a, first_k, size_k);
      b.load(next_b, first_k, size_k);
    };
    load(0);
    for (int64_t first_k = 0; first_k < size_k; first_k += kKTile) {
      a.store(next_a, a_tile);
      b.store(next_b, b_tile);
      __syncthreads();
      // Elements past the end are zero. With a condition here, nvcc would load them after the
      // multiplication.
      load(first_k + kKTile);
      add_k_tile(a_tile, b_tile);
      if ((first_k + kKTile) % kPartialK == 0) add_partial();
      __syncthreads();
    }
  }

  __device__ void add_k_tile(const acc_t (*a_tile)[kStride], const acc_t (*b_tile)[kStride]) {
    const int row = threadIdx.x / kSide * kThreadTile;
    const int column = threadIdx.x % kSide * kThreadTile;
#pragma unroll
    for (int k = 0; k < kKTile; ++k) {
      acc_t a[kThreadTile], b[kThreadTile];
#pragma unroll
      for (int i = 0; i < kThreadTile; ++i) {
        a[i] = a_tile[k][row + i];
        b[i] = b_tile[k][column + i];
      }
#pragma unroll
      for (int i = 0; i < kThreadTile; ++i) {
#pragma unroll
        for (int j = 0; j < kThreadTile; ++j) partial[i][j] = std::fma(a[i], b[j], partial[i][j]);
      }
    }
  }

  __device__ void add_partial() {
#pragma unroll
    for (int i = 0; i < kThreadTile; ++i) {
#pragma unroll
      for (int j = 0; j < kThreadTile; ++j) {
        total[i][j] += partial[i][j];
        partial[i][j] = 0;
      }
    }
  }

  // Calls write(row, column, value) for each element of this thread.
  template <typename Write>
  __device__ void epilogue(const Write& write) const {
#pragma unroll
    for (int i = 0; i < kThreadTile; ++i) {
#pragma unroll
      for (int j = 0; j < kThreadTile; ++j) {
        write(static_cast<int>(threadIdx.x) / kSide * kThreadTile + i,
              static_cast<int>(threadIdx.x) % kSide * kThreadTile + j, total[i][j] + partial[i][j]);
      }
    }
  }
};

}  // namespace moe_ext::cuda::simt
