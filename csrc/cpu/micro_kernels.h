// The innermost loops of the matrix products: a tile of C from a panel of A and a panel of B.
//
// A panel is a few rows of A, or columns of B, in words: a number of acc_t, or two bfloat16
// numbers, neighbours in the depth of the product, in the place of a float. Word q of row or column
// i stands at q * width + i, width being the panel's.
#pragma once

#include <cstdint>

namespace moe_ext::cpu {

// What a tile fetches into the cache meanwhile, for a later panel of B: chunks as wide as B's
// panel, the one of number first + (q >> slowness) with word q. Chunk n is in row n & mask, after
// those of n >> shift chunks before it there.
struct Prefetch {
  const char* data;
  int64_t stride;  // bytes between rows; 0: nothing
  int64_t mask;
  int shift;
  int slowness;
  int64_t first;
};

// Where a tile goes, and how.
template <typename acc_t>
struct Out {
  acc_t* c;
  int64_t stride;
  const acc_t* add = nullptr;  // what is added to it, if anything
  int64_t stride_add = 0;
  bool stream = false;  // past the caches, where there is such an instruction and c is aligned
};

// C [rows, columns] = A B by panels that are num_words deep. Each element of A B is one chain of
// multiply-adds in the order of the depth, whatever the other rows and columns are. Where `packed`
// is not null, B's panel is copied there on the way, in rows of kMaxTileVectors vectors, aligned;
// pairs are packed before.
template <typename acc_t>
using Tile = void (*)(int64_t num_words, const acc_t* a, const acc_t* b, int64_t stride_b,
                      const Out<acc_t>& out, const Prefetch& prefetch, acc_t* packed);

constexpr int kMaxTileRows = 32;
constexpr int kMaxTileVectors = 2;

// C [rows, num_columns] = A B in the same chains, which go on in C unless it `starts`. B is read
// row after row, for an A so small that reading B is what takes time. `ahead` are the rows to be
// fetched into the cache meanwhile, stride_b apart, one after the other.
template <typename acc_t>
using FewRows = void (*)(int64_t num_words, const acc_t* a, const acc_t* b, int64_t stride_b,
                         int64_t num_columns, const acc_t* ahead, bool starts, acc_t* c,
                         int64_t stride_c);

// The same of a transposed B, a vector of its columns, which are read where they are. Rows of A and
// columns of B are contiguous, stride_a and stride_b apart, and depth in whole vectors; C is added
// to unless it `starts`. As many numbers as are read are fetched from `ahead` on.
template <typename acc_t>
using FewRowsTransposed = void (*)(int64_t depth, const acc_t* a, int64_t stride_a, const acc_t* b,
                                   int64_t stride_b, const acc_t* ahead, bool starts, acc_t* c,
                                   int64_t stride_c);

constexpr int kMaxFewRows = 10;

// What there is for an instruction set and a type.
template <typename acc_t>
struct MicroKernels {
  const char* name;
  bool pairs;            // of bfloat16 numbers are the words
  bool a_by_rows;        // panels of A are in blocks of `lanes` words by rows instead
  int64_t depth;         // num_words is a multiple of it
  int64_t rows;          // of a tile, at most
  int64_t panel_stride;  // the width of A's panels
  int64_t lanes;         // words of a vector: B's panels are kMaxTileVectors wide
  Tile<acc_t> tile[kMaxTileVectors][kMaxTileRows];  // [vectors - 1][rows - 1]
  FewRows<acc_t> few_rows[kMaxFewRows];  // [rows - 1]; num_columns in whole vectors; not of pairs
  FewRowsTransposed<acc_t> few_rows_transposed[kMaxFewRows];  // likewise
  void (*start)();  // before a thread's tiles, and after; or null
  void (*stop)();
};

// The best for the products of scalar_t, with what MOE_EXT_ISA allows; acc_t is the type that they
// are summed in.
template <typename scalar_t, typename acc_t>
const MicroKernels<acc_t>& micro_kernels();

}  // namespace moe_ext::cpu
