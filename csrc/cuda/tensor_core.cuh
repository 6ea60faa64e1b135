// The part of a grouped GEMM that one block computes: half-precision matrices on the tensor cores,
// accumulated in float32. The words are those of CUTLASS.
//
// The k-tiles of both operands are copied to shared memory several stages ahead. Their lines are
// aligned to 16 bytes in both memories. kPad elements between two lines avoid bank conflicts.
#pragma once

#include <cuda_pipeline.h>

#include "mma.cuh"
#include "vectors.cuh"

namespace moe_ext::cuda::tensor_core {

constexpr int kBlockTile = 128;     // rows and columns of the result
constexpr int kKTile = 32;          // depth of a k-tile
constexpr int kStages = 4;          // k-tiles in shared memory
constexpr int kBlockThreads = 128;  // four warps, each with a quarter of the result
constexpr int kWarpTile = kBlockTile / 2;
constexpr int kFragment = 16;  // rows or columns, and depth, of four 8 x 8 matrices
constexpr int kFragments = kWarpTile / kFragment;
constexpr int kAccess = 8;  // elements in 16 bytes
constexpr int kPad = kAccess;
constexpr int kEpilogueStride = kWarpTile + kPad;

// The operand A or B of a block. Its lines of contiguous elements are rows of A or columns of B if
// it is K-major; else each line has one k.
template <typename scalar_t, bool kKMajor>
struct Operand {
  static constexpr int kLines = kKMajor ? kBlockTile : kKTile;
  static constexpr int kLength = kKMajor ? kKTile : kBlockTile;
  static constexpr int kStride = kLength + kPad;
  static constexpr int kSize = kLines * kStride;

  const scalar_t* data;  // at the first row or column of the block, k = 0
  int64_t stride;        // from one line to the next
  int64_t extent;        // the number of rows or columns from the first one on

  // Starts to copy the k-tile at first_k to shared memory; elements out of range are zero.
  __device__ void load(scalar_t* shared, int64_t first_k, int64_t size_k) const {
    constexpr int kAccesses = kLength / kAccess;
    const int along = threadIdx.x % kAccesses * kAccess;
#pragma unroll
    for (int i = 0; i < kLines * kAccesses / kBlockThreads; ++i) {
      const int line = threadIdx.x / kAccesses + i * (kBlockThreads / kAccesses);
      const int64_t k = first_k + (kKMajor ? along : line);
      const int64_t mn = kKMajor ? line : along;
      const bool inside = k < size_k && mn < extent;
      const scalar_t* from = data + (kKMajor ? mn * stride + k : k * stride + mn);
      __pipeline_memcpy_async(shared + line * kStride + along, inside ? from : data, 16,
                              inside ? 0 : 16);
    }
  }

  // Loads the fragment at (mn, k) from shared memory, one matrix for each half of both. In A, the
  // halves of the rows vary fastest; in B, those of k do.
  template <bool kIsA>
  static __device__ __forceinline__ void load_fragment(uint32_t (&fragment)[4],
                                                       const scalar_t* shared, int mn, int k) {
    const int lane = threadIdx.x % kWarp;
    const int half_of_mn = kIsA ? lane / 8 % 2 : lane / 16;
    const int half_of_k = kIsA ? lane / 16 : lane / 8 % 2;
    mn += half_of_mn * 8 + (kKMajor ? lane % 8 : 0);
    k += half_of_k * 8 + (kKMajor ? 0 : lane % 8);
    load_matrices</*kTransposed=*/!kKMajor>(
        fragment, shared + (kKMajor ? mn * kStride + k : k * kStride + mn));
  }
};

// The shared memory of a block in bytes.
template <bool kKMajorA, bool kKMajorB>
constexpr int64_t kSharedBytes = int64_t(kStages) * 2 *
                                 (Operand<c10::Half, kKMajorA>::kSize +
                                  Operand<c10::Half, kKMajorB>::kSize);

// out[m, n] = sum over k of a[m, k] b[k, n], plus bias[n] if given, for a block's part of the
// result. The lines of `out` are `stride` apart. All threads of the block must call it.
template <typename scalar_t, bool kKMajorA, bool kKMajorB>
__device__ __forceinline__ void multiply(const Operand<scalar_t, kKMajorA>& a,
                                         const Operand<scalar_t, kKMajorB>& b, int64_t size_k,
                                         const scalar_t* __restrict__ bias,
                                         scalar_t* __restrict__ out, int64_t stride,
                                         unsigned char* shared_space) {
  using A = Operand<scalar_t, kKMajorA>;
  using B = Operand<scalar_t, kKMajorB>;
  float accumulators[kFragments][2 * kFragments][4] = {};  // a lane's part of 16 rows by 8 columns

  auto* shared = reinterpret_cast<scalar_t*>(shared_space);
  const auto stage = [&](int64_t tile) { return shared + tile % kStages * (A::kSize + B::kSize); };
  const auto load = [&](int64_t tile) {
    a.load(stage(tile), tile * kKTile, size_k);
    b.load(stage(tile) + A::kSize, tile * kKTile, size_k);
  };
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int first_row = warp / 2 * kWarpTile, first_column = warp % 2 * kWarpTile;
  const bool has_tile = first_row < a.extent && first_column < b.extent;
  const int64_t num_tiles = ceil_div(size_k, kKTile);
  for (int64_t tile = 0; tile < kStages - 1; ++tile) {
    if (tile < num_tiles) load(tile);
    __pipeline_commit();
  }
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    __pipeline_wait_prior(kStages - 2);
    __syncthreads();  // the k-tile is loaded, and no thread uses the one before
    if (tile + kStages - 1 < num_tiles) load(tile + kStages - 1);
    __pipeline_commit();
    if (!has_tile) continue;
#pragma unroll
    for (int k = 0; k < kKTile; k += kFragment) {
      uint32_t fragments_of_a[kFragments][4];
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        A::template load_fragment<true>(fragments_of_a[i], stage(tile), first_row + i * kFragment,
                                        k);
      }
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
        uint32_t fragment_of_b[4];
        B::template load_fragment<false>(fragment_of_b, stage(tile) + A::kSize,
                                         first_column + j * kFragment, k);
#pragma unroll
        for (int i = 0; i < kFragments; ++i) {
          multiply_add<scalar_t>(accumulators[i][2 * j], fragments_of_a[i], fragment_of_b[0],
                                 fragment_of_b[1]);
          multiply_add<scalar_t>(accumulators[i][2 * j + 1], fragments_of_a[i], fragment_of_b[2],
                                 fragment_of_b[3]);
        }
      }
    }
  }
  __pipeline_wait_prior(0);
  __syncthreads();  // shared memory is free
  if (!has_tile) return;

  // The epilogue copies through shared memory, so a warp writes lines of 128 bytes.
  static_assert(4 * kWarpTile * kEpilogueStride <= kStages * (A::kSize + B::kSize));
  scalar_t* warp_tile = shared + warp * kWarpTile * kEpilogueStride;
#pragma unroll
  for (int j = 0; j < 2 * kFragments; ++j) {
    const int column = j * 8 + lane % 4 * 2;
    float add[2] = {};
    if (bias != nullptr && first_column + column < b.extent) {
      add[0] = static_cast<float>(bias[first_column + column]);
      add[1] = static_cast<float>(bias[first_column + column + 1]);
    }
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = i * kFragment + half * 8 + lane / 4;
        const Vector<scalar_t, 2> pair{
            static_cast<scalar_t>(accumulators[i][j][2 * half] + add[0]),
            static_cast<scalar_t>(accumulators[i][j][2 * half + 1] + add[1])};
        *reinterpret_cast<Vector<scalar_t, 2>*>(warp_tile + row * kEpilogueStride + column) = pair;
      }
    }
  }
  __syncwarp();
  using Vec = Vector<scalar_t, kAccess>;
  constexpr int kAccesses = kWarpTile / kAccess;
  const int column = lane % kAccesses * kAccess;
  for (int row = lane / kAccesses; row < kWarpTile; row += kWarp / kAccesses) {
    if (first_row + row >= a.extent || first_column + column >= b.extent) continue;
    *reinterpret_cast<Vec*>(out + (first_row + row) * stride + first_column + column) =
        *reinterpret_cast<const Vec*>(warp_tile + row * kEpilogueStride + column);
  }
}

}  // namespace moe_ext::cuda::tensor_core
