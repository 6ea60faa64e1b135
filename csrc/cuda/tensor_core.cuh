// The part of a grouped GEMM that one block computes: half-precision matrices on the tensor cores,
// accumulated in float32.
//
// The factors are copied to shared memory several steps of the sum ahead. Their lines are aligned
// to 16 bytes in both memories. kPad elements between two lines avoid bank conflicts.
#pragma once

#include <cuda_pipeline.h>

#include "mma.cuh"
#include "packs.cuh"

namespace moe_ext::cuda::tensor_core {

constexpr int kTile = 128;          // rows and columns of a block's part of the result
constexpr int kDepth = 32;          // terms of the sum in a step
constexpr int kStages = 4;          // steps in shared memory
constexpr int kBlockThreads = 128;  // four warps, each with a quarter of the result
constexpr int kWarpTile = kTile / 2;
constexpr int kFragment = 16;  // rows or columns, and terms, of four 8 x 8 matrices
constexpr int kFragments = kWarpTile / kFragment;
constexpr int kChunk = 8;  // elements in 16 bytes
constexpr int kPad = kChunk;
constexpr int kOutStride = kWarpTile + kPad;

// A factor consists of lines of contiguous elements. With kAlong the sum runs along the lines, else
// across them. A place is a row of the first factor or a column of the second.
template <typename scalar_t, bool kAlong>
struct Factor {
  static constexpr int kLines = kAlong ? kTile : kDepth;
  static constexpr int kLength = kAlong ? kDepth : kTile;
  static constexpr int kStride = kLength + kPad;
  static constexpr int kSize = kLines * kStride;

  const scalar_t* data;  // at the first place of the block's part, first term
  int64_t stride;        // from one line to the next
  int64_t num_places;    // from the first place on

  // Starts to copy kDepth terms from `first` on to shared memory; elements out of range are zero.
  __device__ void load(scalar_t* shared, int64_t first, int64_t num_terms) const {
    constexpr int kChunks = kLength / kChunk;
    const int along = threadIdx.x % kChunks * kChunk;
#pragma unroll
    for (int i = 0; i < kLines * kChunks / kBlockThreads; ++i) {
      const int line = threadIdx.x / kChunks + i * (kBlockThreads / kChunks);
      const int64_t term = first + (kAlong ? along : line);
      const int64_t place = kAlong ? line : along;
      const bool inside = term < num_terms && place < num_places;
      const scalar_t* from = data + (kAlong ? place * stride + term : term * stride + place);
      __pipeline_memcpy_async(shared + line * kStride + along, inside ? from : data, 16,
                              inside ? 0 : 16);
    }
  }

  // Loads kFragment places and terms from shared memory, one matrix for each half of both. In the
  // first factor, the places vary fastest; in the second, the terms do.
  template <bool kIsFirst>
  static __device__ __forceinline__ void fragment(uint32_t (&matrices)[4], const scalar_t* shared,
                                                  int place, int term) {
    const int lane = threadIdx.x % kWarp;
    const int half_of_place = kIsFirst ? lane / 8 % 2 : lane / 16;
    const int half_of_term = kIsFirst ? lane / 16 : lane / 8 % 2;
    place += half_of_place * 8 + (kAlong ? lane % 8 : 0);
    term += half_of_term * 8 + (kAlong ? 0 : lane % 8);
    load_matrices</*kTransposed=*/!kAlong>(
        matrices, shared + (kAlong ? place * kStride + term : term * kStride + place));
  }
};

// The shared memory of a block in bytes, by the kAlong of both factors.
template <bool kAlongA, bool kAlongB>
constexpr int64_t kSharedBytes = int64_t(kStages) * 2 *
                                 (Factor<at::Half, kAlongA>::kSize +
                                  Factor<at::Half, kAlongB>::kSize);

// out[m, n] = sum over num_terms of a[m, k] b[k, n], plus bias[n] if given, for a block's part of
// the result. The lines of `out` are `stride` apart. All threads of the block must call it.
template <typename scalar_t, bool kAlongA, bool kAlongB>
__device__ __forceinline__ void multiply(const Factor<scalar_t, kAlongA>& a,
                                         const Factor<scalar_t, kAlongB>& b, int64_t num_terms,
                                         const scalar_t* __restrict__ bias,
                                         scalar_t* __restrict__ out, int64_t stride,
                                         unsigned char* shared_space) {
  using A = Factor<scalar_t, kAlongA>;
  using B = Factor<scalar_t, kAlongB>;
  float sum[kFragments][2 * kFragments][4] = {};  // a lane's part of 16 rows by 8 columns

  auto* shared = reinterpret_cast<scalar_t*>(shared_space);
  const auto stage = [&](int64_t step) { return shared + step % kStages * (A::kSize + B::kSize); };
  const auto load = [&](int64_t step) {
    a.load(stage(step), step * kDepth, num_terms);
    b.load(stage(step) + A::kSize, step * kDepth, num_terms);
  };
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int first_row = warp / 2 * kWarpTile, first_column = warp % 2 * kWarpTile;
  const bool has_part = first_row < a.num_places && first_column < b.num_places;
  const int64_t num_steps = ceil_div(num_terms, kDepth);
  for (int64_t step = 0; step < kStages - 1; ++step) {
    if (step < num_steps) load(step);
    __pipeline_commit();
  }
  for (int64_t step = 0; step < num_steps; ++step) {
    __pipeline_wait_prior(kStages - 2);
    __syncthreads();  // the step is loaded, and no thread uses the step before
    if (step + kStages - 1 < num_steps) load(step + kStages - 1);
    __pipeline_commit();
    if (!has_part) continue;
#pragma unroll
    for (int k = 0; k < kDepth; k += kFragment) {
      uint32_t left[kFragments][4];
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        A::template fragment<true>(left[i], stage(step), first_row + i * kFragment, k);
      }
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
        uint32_t right[4];
        B::template fragment<false>(right, stage(step) + A::kSize, first_column + j * kFragment, k);
#pragma unroll
        for (int i = 0; i < kFragments; ++i) {
          multiply_add<scalar_t>(sum[i][2 * j], left[i], right[0], right[1]);
          multiply_add<scalar_t>(sum[i][2 * j + 1], left[i], right[2], right[3]);
        }
      }
    }
  }
  __pipeline_wait_prior(0);
  __syncthreads();  // shared memory is free
  if (!has_part) return;

  // Copies through shared memory, so a warp writes lines of 128 bytes.
  static_assert(4 * kWarpTile * kOutStride <= kStages * (A::kSize + B::kSize));
  scalar_t* part = shared + warp * kWarpTile * kOutStride;
#pragma unroll
  for (int j = 0; j < 2 * kFragments; ++j) {
    const int column = j * 8 + lane % 4 * 2;
    float add[2] = {};
    if (bias != nullptr && first_column + column < b.num_places) {
      add[0] = static_cast<float>(bias[first_column + column]);
      add[1] = static_cast<float>(bias[first_column + column + 1]);
    }
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = i * kFragment + half * 8 + lane / 4;
        const Pack<scalar_t, 2> pair{static_cast<scalar_t>(sum[i][j][2 * half] + add[0]),
                                     static_cast<scalar_t>(sum[i][j][2 * half + 1] + add[1])};
        *reinterpret_cast<Pack<scalar_t, 2>*>(part + row * kOutStride + column) = pair;
      }
    }
  }
  __syncwarp();
  using Packed = Pack<scalar_t, kChunk>;
  constexpr int kChunks = kWarpTile / kChunk;
  const int column = lane % kChunks * kChunk;
  for (int row = lane / kChunks; row < kWarpTile; row += kWarp / kChunks) {
    if (first_row + row >= a.num_places || first_column + column >= b.num_places) continue;
    *reinterpret_cast<Packed*>(out + (first_row + row) * stride + first_column + column) =
        *reinterpret_cast<const Packed*>(part + row * kOutStride + column);
  }
}

}  // namespace moe_ext::cuda::tensor_core
