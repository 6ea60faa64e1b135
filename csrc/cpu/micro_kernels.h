// The innermost loops of the matrix products: a tile of C from a panel of A and a panel of B.
//
// A panel is a few rows of A, or columns of B, in the order in which they are read: element (i, p),
// i in the panel and p in the depth of the product, stands at p * stride + i.
#pragma once

#include <cstdint>

namespace moe_ext::cpu {

// What a tile fetches into the cache meanwhile, for a later panel: `width` rows, `chunk` bytes of
// each at every turn, where width is that of the panel of B.
struct Prefetch {
  const char* data;
  int64_t stride;  // bytes
  int64_t chunk;
};

// C [rows, columns] = A B, or C += A B, for a panel of `rows` rows and one of `vectors` vectors of
// columns. Each element of A B is one chain of fused multiply-adds in the order of p, whatever the
// other rows and columns are.
template <typename acc_t>
using Tile = void (*)(int64_t depth, const acc_t* a, const acc_t* b, int64_t stride_b, acc_t* c,
                      int64_t stride_c, bool accumulate, const Prefetch& prefetch);

constexpr int kMaxTileRows = 14;
constexpr int kMaxTileVectors = 2;

// What there is for an instruction set.
template <typename acc_t>
struct MicroKernels {
  const char* name;
  int64_t rows;                                     // of a tile, at most
  int64_t panel_stride;                             // of A
  int64_t lanes;                                    // of a vector
  Tile<acc_t> tile[kMaxTileVectors][kMaxTileRows];  // [vectors - 1][rows - 1]
};

// Those for the instruction set in use.
template <typename acc_t>
const MicroKernels<acc_t>& micro_kernels();

}  // namespace moe_ext::cpu
