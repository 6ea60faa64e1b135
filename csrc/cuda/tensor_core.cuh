// A tile of a grouped GEMM, which one block computes: half-precision matrices on the tensor cores,
// accumulated in float32. The words are those of CUTLASS.
//
// The k-tiles of both operands are copied to shared memory several stages ahead. Their lines are
// aligned to 16 bytes in both memories. kPad elements between two lines avoid bank conflicts.
//
// A tile has kColumns columns and 16, 32, 64 or 128 rows. Every height adds the terms of an element
// in the same order, so a result does not depend on the height.
#pragma once

#include <cuda_pipeline.h>

#include "mma.cuh"
#include "vectors.cuh"

namespace moe_ext::cuda::tensor_core {

constexpr int kMostRows = 128;
constexpr int kColumns = 128;
constexpr int kKTile = 32;          // depth of a k-tile
constexpr int kStages = 4;          // k-tiles in shared memory
constexpr int kBlockThreads = 128;  // four warps
constexpr int kFragment = 16;       // rows or columns, and depth, of four 8 x 8 matrices
constexpr int kAccess = 8;          // elements in 16 bytes
constexpr int kPad = kAccess;

// The part of a tile of kRows rows that each of the four warps computes.
template <int kRows>
struct WarpTile {
  static constexpr int kAcross = kRows == kMostRows ? 2 : 4;  // warps with the same rows
  static constexpr int kHeight = kRows * kAcross / (kBlockThreads / kWarp);
  static constexpr int kWidth = kColumns / kAcross;
  static constexpr int kStride = kWidth + kPad;  // of lines in shared memory, in the epilogue
};

// The operand A or B of a tile. Its lines of contiguous elements are rows of A or columns of B if
// it is K-major; else each line has one k. Of the tile, it has kSize rows or columns.
template <typename scalar_t, bool kKMajor, int kSize>
class Operand {
  static constexpr int kLines = kKMajor ? kSize : kKTile;
  static constexpr int kLength = kKMajor ? kKTile : kSize;
  static constexpr int kStride = kLength + kPad;
  static constexpr int kAccesses = kLength / kAccess;             // of a line
  static constexpr int kLinesAtOnce = kBlockThreads / kAccesses;  // of the block
  static constexpr int kCopies = ceil_div(kLines, kLinesAtOnce);  // of a thread

 public:
  static constexpr int kElements = kLines * kStride;  // of a k-tile in shared memory

  // `data` is at the first row or column of the tile and k = 0. `stride` is the distance of lines.
  // `extent` is the number of rows or columns from the first one on.
  __device__ Operand(const scalar_t* data, int64_t stride, int64_t extent, int64_t size_k)
      : extent(extent), from_(data + line() * stride + along()), stride_(stride), rest_k_(size_k) {}

  // Starts to copy the next k-tile to shared memory; elements out of range are zero.
  __device__ __forceinline__ void load_next(scalar_t* shared) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int l = line() + i * kLinesAtOnce;
      if (kLines % kLinesAtOnce != 0 && l >= kLines) break;
      const bool inside = (kKMajor ? along() : l) < rest_k_ && (kKMajor ? l : along()) < extent;
      copy_async(shared + l * kStride + along(), from_ + i * kLinesAtOnce * stride_, inside);
    }
    from_ += kKMajor ? kKTile : kKTile * stride_;
    rest_k_ -= kKTile;
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

  const int64_t extent;

 private:
  // The thread's first line of a k-tile, and its first element in all its lines.
  static __device__ int line() { return threadIdx.x / kAccesses; }
  static __device__ int along() { return threadIdx.x % kAccesses * kAccess; }

  const scalar_t* from_;  // what the thread copies first of the next k-tile
  const int64_t stride_;
  int64_t rest_k_;  // from the next k-tile on
};

// The shared memory of a block in bytes.
template <int kRows, bool kKMajorA, bool kKMajorB>
constexpr int64_t kSharedBytes = int64_t(kStages) * 2 *
                                 (Operand<c10::Half, kKMajorA, kRows>::kElements +
                                  Operand<c10::Half, kKMajorB, kColumns>::kElements);

// out[m, n] = sum over k of a[m, k] b[k, n], for a tile of the result. The lines of `out` are
// `stride` apart. All threads of the block must call it; the shared memory is in use until all have
// returned.
template <typename scalar_t, bool kKMajorA, bool kKMajorB, int kRows>
__device__ __forceinline__ void multiply(Operand<scalar_t, kKMajorA, kRows> a,
                                         Operand<scalar_t, kKMajorB, kColumns> b, int64_t size_k,
                                         scalar_t* __restrict__ out, int64_t stride,
                                         unsigned char* shared_space) {
  using A = Operand<scalar_t, kKMajorA, kRows>;
  using B = Operand<scalar_t, kKMajorB, kColumns>;
  using Tile = WarpTile<kRows>;
  constexpr int kFragmentsOfA = Tile::kHeight / kFragment, kFragmentsOfB = Tile::kWidth / kFragment;
  // A lane's part of 16 rows by 8 columns.
  float accumulators[kFragmentsOfA][2 * kFragmentsOfB][4] = {};

  auto* shared = reinterpret_cast<scalar_t*>(shared_space);
  const auto stage = [&](int64_t k_tile) {
    return shared + k_tile % kStages * (A::kElements + B::kElements);
  };
  const auto load = [&](int64_t k_tile) {
    a.load_next(stage(k_tile));
    b.load_next(stage(k_tile) + A::kElements);
  };
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int first_row = warp / Tile::kAcross * Tile::kHeight;
  const int first_column = warp % Tile::kAcross * Tile::kWidth;
  const bool has_tile = first_row < a.extent && first_column < b.extent;
  const int64_t num_k_tiles = ceil_div(size_k, kKTile);
  for (int64_t k_tile = 0; k_tile < kStages - 1; ++k_tile) {
    if (k_tile < num_k_tiles) load(k_tile);
    __pipeline_commit();
  }
  for (int64_t k_tile = 0; k_tile < num_k_tiles; ++k_tile) {
    __pipeline_wait_prior(kStages - 2);
    __syncthreads();  // the k-tile is loaded, and no thread uses the one before
    if (k_tile + kStages - 1 < num_k_tiles) load(k_tile + kStages - 1);
    __pipeline_commit();
    if (!has_tile) continue;
#pragma unroll
    for (int k = 0; k < kKTile; k += kFragment) {
      uint32_t fragments_of_a[kFragmentsOfA][4];
#pragma unroll
      for (int i = 0; i < kFragmentsOfA; ++i) {
        A::template load_fragment<true>(fragments_of_a[i], stage(k_tile), first_row + i * kFragment,
                                        k);
      }
#pragma unroll
      for (int j = 0; j < kFragmentsOfB; ++j) {
        uint32_t fragment_of_b[4];
        B::template load_fragment<false>(fragment_of_b, stage(k_tile) + A::kElements,
                                         first_column + j * kFragment, k);
#pragma unroll
        for (int i = 0; i < kFragmentsOfA; ++i) {
          multiply_add<scalar_t>(accumulators[i][2 * j], fragments_of_a[i], fragment_of_b[0],
                                 fragment_of_b[1]);
          multiply_add<scalar_t>(accumulators[i][2 * j + 1], fragments_of_a[i], fragment_of_b[2],
                                 fragment_of_b[3]);
        }
      }
    }
  }
  __pipeline_wait_prior(0);
  __syncthreads();  // no thread reads k-tiles
  if (!has_tile) return;

  // The epilogue copies through shared memory, so that a warp writes vectors of 16 bytes.
  static_assert(kBlockThreads / kWarp * Tile::kHeight * Tile::kStride <=
                kStages * (A::kElements + B::kElements));
  scalar_t* warp_tile = shared + warp * Tile::kHeight * Tile::kStride;
#pragma unroll
  for (int j = 0; j < 2 * kFragmentsOfB; ++j) {
    const int column = j * 8 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kFragmentsOfA; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = i * kFragment + half * 8 + lane / 4;
        const Vector<scalar_t, 2> pair{static_cast<scalar_t>(accumulators[i][j][2 * half]),
                                       static_cast<scalar_t>(accumulators[i][j][2 * half + 1])};
        *reinterpret_cast<Vector<scalar_t, 2>*>(warp_tile + row * Tile::kStride + column) = pair;
      }
    }
  }
  __syncwarp();
  using Vec = Vector<scalar_t, kAccess>;
  constexpr int kAccesses = Tile::kWidth / kAccess;
  const int column = lane % kAccesses * kAccess;
  for (int row = lane / kAccesses; row < Tile::kHeight; row += kWarp / kAccesses) {
    if (first_row + row >= a.extent || first_column + column >= b.extent) continue;
    *reinterpret_cast<Vec*>(out + (first_row + row) * stride + first_column + column) =
        *reinterpret_cast<const Vec*>(warp_tile + row * Tile::kStride + column);
  }
}

}  // namespace moe_ext::cuda::tensor_core
