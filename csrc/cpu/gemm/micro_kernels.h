// The micro-kernels of the GEMM: the innermost loops, one set of them for each instruction set. The
// terms are those of BLIS (Van Zee and van de Geijn, 2015).
//
// A K-group is what one lane of a vector multiplies at once: one number of acc_t or, in the place
// of a float, a pair of bfloat16 numbers that are neighbours in K. A micro-panel is a few rows of A
// or columns of B, packed by K-groups: K-group q of row or column i is at q * width + i.
#pragma once

#include <cstdint>

namespace moe_ext::cpu {

// What a micro-kernel prefetches for a later micro-panel of B. With K-group q it prefetches chunk
// n = first + (q >> shift_groups), which is as wide as a micro-panel: in row n & row_mask, after
// the n >> shift_rows chunks that this row has before it.
struct Prefetch {
  const char* data;
  int64_t stride;  // bytes between rows, 0 to prefetch nothing
  int64_t row_mask;
  int shift_rows;
  int shift_groups;
  int64_t first;
};

// A tile of C, and how a micro-kernel writes it.
template <typename acc_t>
struct Tile {
  acc_t* c;
  int64_t ldc;
  const acc_t* add = nullptr;  // a tile that is added to the product, or null
  int64_t ld_add = 0;
  bool non_temporal = false;  // past the caches, if the instruction set can and c is aligned
};

constexpr int kMaxTileRows = 32;
constexpr int kMaxTileVectors = 2;

// C = A B [+ add], a tile of it, from micro-panels that are num_groups deep. Each element of A B is
// one chain of fused multiply-adds in the order of K, whatever the other rows and columns are. If
// `packed` is not null, B's micro-panel is copied there on the way, in aligned rows of
// kMaxTileVectors vectors; pairs have been packed before.
template <typename acc_t>
using GemmKernel = void (*)(int64_t num_groups, const acc_t* a, const acc_t* b, int64_t ldb,
                            const Tile<acc_t>& tile, const Prefetch& prefetch, acc_t* packed);

// The same chains for so few rows of A that reading B takes most of the time. BLIS has them at its
// level 1f: axpyf adds multiples of the rows of B to C, dotxf computes dot products with the
// columns of B.

constexpr int kMaxFewRows = 10;

// C [rows, num_columns] = A B, added to C unless it `starts`. B is read in place, row after row.
// `prefetch_b` are the rows of B, ldb apart, that are prefetched in the same order meanwhile.
template <typename acc_t>
using AxpyfKernel = void (*)(int64_t num_groups, const acc_t* a, const acc_t* b, int64_t ldb,
                             int64_t num_columns, const acc_t* prefetch_b, bool starts, acc_t* c,
                             int64_t ldc);

// C [rows, lanes] = A B^T, added to C unless it `starts`. Both are read in place: rows of A and
// rows of the transposed B are contiguous, and `depth` is a multiple of the lanes of a vector. As
// many numbers as are read are prefetched from `prefetch_b` on.
template <typename acc_t>
using DotxfKernel = void (*)(int64_t depth, const acc_t* a, int64_t lda, const acc_t* b,
                             int64_t ldb, const acc_t* prefetch_b, bool starts, acc_t* c,
                             int64_t ldc);

// The micro-kernels of an instruction set for a type.
template <typename acc_t>
struct MicroKernels {
  const char* name;
  bool pairs = false;            // whether a K-group is a pair of bfloat16 numbers
  bool a_in_row_blocks = false;  // whether micro-panels of A are in blocks of `lanes` K-groups,
                                 // each by rows
  int64_t group_multiple = 1;    // num_groups is a multiple of it
  int64_t max_rows;              // of a tile: MR
  int64_t a_panel_width;         // the width of A's micro-panels
  int64_t lanes;                 // K-groups in a vector; NR, the width of B's micro-panels, is
                                 // kMaxTileVectors vectors
  GemmKernel<acc_t> gemm[kMaxTileVectors][kMaxTileRows] = {};  // [vectors - 1][rows - 1]
  AxpyfKernel<acc_t> axpyf[kMaxFewRows] = {};  // [rows - 1], for whole vectors; not of pairs
  DotxfKernel<acc_t> dotxf[kMaxFewRows] = {};  // [rows - 1], for whole vectors; not of pairs
  void (*begin)() = nullptr;                   // called before a thread's first tile, if not null
  void (*end)() = nullptr;                     // called after its last
};

// The best micro-kernels for factors of scalar_t that MOE_EXT_ISA allows; acc_t is the type of the
// sums.
template <typename scalar_t, typename acc_t>
const MicroKernels<acc_t>& micro_kernels();

// Those of each instruction set, for acc_t float and double.
template <typename acc_t>
const MicroKernels<acc_t>& portable_micro_kernels();
template <typename acc_t>
const MicroKernels<acc_t>& avx2_micro_kernels();
template <typename acc_t>
const MicroKernels<acc_t>& avx512_micro_kernels();
const MicroKernels<float>& avx512_bf16_micro_kernels();
const MicroKernels<float>& amx_micro_kernels();

}  // namespace moe_ext::cpu
