// The micro-kernels of the GEMM: the innermost loops, one set for each instruction set. The terms
// are those of BLIS (Van Zee and van de Geijn, 2015).
//
// A K-group is what one vector lane multiplies at once: one number of type acc_t or a pair of
// bfloat16 numbers. The numbers of a pair are adjacent in K and take the place of a float. A
// micro-panel has a few rows of A or columns of B, packed by K-groups: K-group q of row or column i
// is at q * width + i.
#pragma once

#include <cstdint>

#include "../../kernels/types.h"
#include "../../math/integers.h"
#include "kernel_table.h"

namespace moe_ext::cpu {

// What a micro-kernel prefetches for a later micro-panel of B. K-group q prefetches chunk n = first
// + (q >> shift_groups). A chunk is as wide as a micro-panel; chunk n is in row n & row_mask, at
// position n >> shift_rows of that row.
struct Prefetch {
  const char* data;
  int64_t stride;  // bytes between rows; 0: no prefetch
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
  const acc_t* add = nullptr;  // a tile that is added to the result, or null
  int64_t ld_add = 0;
  bool non_temporal = false;         // non-temporal stores if available and c is aligned
  c10::BFloat16* rounded = nullptr;  // if not null, the tile is rounded and written here, not to c
};

constexpr int kMaxTileRows = 32;
constexpr int kMaxTileVectors = 2;

// Computes a tile of C = A B [+ add] from micro-panels with num_groups K-groups. Each element of A
// B is one chain of fused multiply-adds in the order of K. It does not depend on the other rows and
// columns. If `packed` is not null, the micro-panel of B is also copied there, in aligned rows of
// kMaxTileVectors vectors. Pairs are packed before the call.
template <typename acc_t>
using GemmKernel = void (*)(int64_t num_groups, const acc_t* a, const acc_t* b, int64_t ldb,
                            const Tile<acc_t>& tile, const Prefetch& prefetch, acc_t* packed);

// Kernels for few rows of A, where reading B takes most of the time. The chains are the same. BLIS
// has these kernels at level 1f: axpyf adds multiples of the rows of B to C, dotxf computes dot
// products with the columns of B.

// C [rows, num_columns] = A B; adds to C unless `starts`. B is read in place, K-group by K-group;
// the rows of a pair are joined in registers. At the same time, the rows at `prefetch_b`, ldb
// apart, are prefetched in the same order. ldb counts elements of type acc_t, num_columns counts
// numbers.
template <typename acc_t>
using AxpyfKernel = void (*)(int64_t num_groups, const acc_t* a, const acc_t* b, int64_t ldb,
                             int64_t num_columns, const acc_t* prefetch_b, bool starts, acc_t* c,
                             int64_t ldc);

// C [rows, lanes] = A B^T; adds to C unless `starts`. A and B are read in place: their rows are
// contiguous along K, and `depth` K-groups are a multiple of the lanes of a vector. The same part
// of the columns at `prefetch_b`, ldb apart, is prefetched in the same order.
template <typename acc_t>
using DotxfKernel = void (*)(int64_t depth, const acc_t* a, int64_t lda, const acc_t* b,
                             int64_t ldb, const acc_t* prefetch_b, bool starts, acc_t* c,
                             int64_t ldc);

// The same kernels for a B in half precision, whose numbers they convert to floats. A has a row of
// floats for each number along K; ldb counts numbers. The kernels add to C unless `starts`.

// The depth of an axpyf; the depth of a dotxf is a multiple of it.
constexpr int64_t kWidenedDepth = 32;

// num_columns is a multiple of 32. The rows at prefetch_b are prefetched in the order of B's.
template <typename half_t>
using WidenedAxpyf = void (*)(const float* a, const half_t* b, int64_t ldb, int64_t num_columns,
                              const half_t* prefetch_b, bool starts, float* c, int64_t ldc);

// The same part of the columns at `prefetch_b`, ldb apart, is prefetched in the same order.
template <typename half_t>
using WidenedDotxf = void (*)(int64_t depth, const float* a, const half_t* b, int64_t ldb,
                              const half_t* prefetch_b, bool starts, float* c, int64_t ldc);

template <typename half_t>
struct WidenedKernels {
  bool rounds_a;                                 // whether A is rounded to half_t
  WidenedAxpyf<half_t> axpyf[kMaxFewRows] = {};  // [rows - 1]
  WidenedDotxf<half_t> dotxf[kMaxFewRows] = {};  // [rows - 1]; computes a vector of columns
};

// The micro-kernels of an instruction set for a type.
template <typename acc_t>
struct MicroKernels {
  const char* name;
  bool pairs = false;            // whether a K-group is a pair of bfloat16 numbers
  bool a_in_row_blocks = false;  // whether a micro-panel of A consists of blocks of `lanes`
                                 // K-groups, each stored by rows
  bool sums_apart = false;       // whether Gebp keeps the sums of an epilogue apart from C
  bool rounds = false;           // whether tiles of kMaxTileVectors vectors can be written rounded
  int64_t group_multiple = 1;    // num_groups must be a multiple of this
  int64_t max_rows;              // of a tile: MR
  int64_t a_panel_width;         // the width of the micro-panels of A
  int64_t lanes;                 // K-groups in a vector; NR, the width of the micro-panels of B, is
                                 // kMaxTileVectors vectors
  GemmKernel<acc_t> gemm[kMaxTileVectors][kMaxTileRows] = {};  // [vectors - 1][rows - 1]
  AxpyfKernel<acc_t> axpyf[kMaxFewRows] = {};  // [rows - 1]; full vectors only, not for AMX
  DotxfKernel<acc_t> dotxf[kMaxFewRows] = {};  // [rows - 1]; full vectors only, not for AMX
  void (*begin)() = nullptr;                   // called before a thread's first tile, if not null
  void (*end)() = nullptr;                     // called after a thread's last tile, if not null

  // The number of elements of a K-group, the columns of a tile, and the K-groups of a depth.
  int64_t group_size() const { return pairs ? 2 : 1; }
  int64_t nr() const { return kMaxTileVectors * lanes; }
  int64_t num_groups(int64_t depth) const {
    return round_up(ceil_div(depth, group_size()), group_multiple);
  }
};

// Returns the micro-kernels that selection.h selects for operands of scalar_t; acc_t is the type of
// the sums.
template <typename scalar_t, typename acc_t>
const MicroKernels<acc_t>& micro_kernels();

// Returns the kernels for few rows of A and a B of half_t. Their sums are bitwise those of
// micro_kernels<half_t>(). Null if those have their own axpyf and dotxf for half_t, or if there are
// none.
template <typename half_t>
const WidenedKernels<half_t>* widened_kernels();

// Returns how selection.h reads B for this number of rows.
template <typename scalar_t>
Reading reading_of(int64_t rows, Layout layout);

// The micro-kernels of each instruction set, for acc_t float and double.
template <typename acc_t>
const MicroKernels<acc_t>& portable_micro_kernels();
template <typename acc_t>
const MicroKernels<acc_t>& avx2_micro_kernels();
template <typename acc_t>
const MicroKernels<acc_t>& avx512_micro_kernels();
const MicroKernels<float>& avx512_bf16_micro_kernels();
const MicroKernels<float>& amx_micro_kernels();
template <typename acc_t>
const MicroKernels<acc_t>& neon_micro_kernels();
const MicroKernels<float>& neon_bf16_micro_kernels();

template <typename half_t>
const WidenedKernels<half_t>& avx2_widened_kernels();
template <typename half_t>
const WidenedKernels<half_t>& avx512_widened_kernels();
const WidenedKernels<c10::BFloat16>& amx_widened_kernels();

}  // namespace moe_ext::cpu
