// General matrix multiplication (GEMM) on one thread, with an epilogue.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "../../kernels/types.h"
#include "../../packed.h"
#include "../arena.h"
#include "../function_ref.h"
#include "../region.h"

namespace moe_ext::cpu {

// A row-major matrix, read as it is or transposed. `ld` (the leading dimension) is the distance
// between rows in elements. A packed matrix has `panels` of a layout instead of data; transposed,
// its columns are the inputs of the layout from `first_input` on.
template <typename T>
struct Operand {
  const T* data;
  int64_t ld;
  bool transposed = false;
  const PackedLayout* layout = nullptr;
  const uint8_t* panels = nullptr;
  int64_t first_input = 0;
};

template <typename T>
Operand<T> plain(const T* data, int64_t ld) {
  return {.data = data, .ld = ld};
}

template <typename T>
Operand<T> transposed(const T* data, int64_t ld) {
  return {.data = data, .ld = ld, .transposed = true};
}

template <typename T>
Operand<T> packed(const PackedLayout& layout, const uint8_t* panels) {
  return {.data = nullptr, .ld = 0, .layout = &layout, .panels = panels};
}

template <typename T>
Operand<T> transpose(Operand<T> matrix) {
  matrix.transposed = !matrix.transposed;
  return matrix;
}

// Returns the columns from `begin` on. That of a packed matrix is a multiple of kPanelOutputs,
// unless the matrix is transposed.
template <typename T>
Operand<T> columns_from(Operand<T> matrix, int64_t begin) {
  if (matrix.layout != nullptr && matrix.transposed) {
    matrix.first_input += begin;
  } else if (matrix.layout != nullptr) {
    matrix.panels += begin / kPanelOutputs * matrix.layout->panel_bytes();
  } else {
    matrix.data += matrix.transposed ? begin * matrix.ld : begin;
  }
  return matrix;
}

// The epilogue of a GEMM.
template <typename b_t>
struct Epilogue {
  // Takes the final sums of a region of C; its rows are `ld` apart. Called exactly once for every
  // element of C, while the sums are in a cache if possible. It may change them. The columns of a
  // row come in ascending order.
  FunctionRef<void(const Region&, acc_type<b_t>* sums, int64_t ld)> run = nullptr;
  // Two hints. `prefetch` is called some time before `run`, to prefetch the data that `run` reads.
  // The B of the next GEMM, next_b, is prefetched near the end of this one.
  FunctionRef<void(const Region&)> prefetch = nullptr;
  Operand<b_t> next_b = {.data = nullptr, .ld = 0};
};

// How C is written. kStream replaces C with non-temporal stores, which bypass the caches, if
// possible.
enum class Write { kReplace, kAdd, kStream };

// A GEMM reaches the full rate with this number of rows, those of an M-block. Callers that split
// rows into blocks, or into tasks of several threads, make parts of at most this size.
constexpr int64_t kFullRateRows = 640;

// The sizes of a GEMM: C is [m, n], and the sums have k terms.
struct GemmSize {
  int64_t m, n, k;
};

// The memory of GEMMs that are at most as large as one of some sizes.
template <typename scalar_t>
struct GemmWorkspace {
  using acc_t = acc_type<scalar_t>;

  GemmWorkspace(Arena& arena, std::initializer_list<GemmSize> sizes);

  acc_t* tile;        // sums of some K-blocks, or a tile at the edge of C
  acc_t* rows;        // kMaxFewRows rows of C
  acc_t* packed_b;    // micro-panels of B
  acc_t* few_rows_a;  // kMaxFewRows rows of A in the type of B
  acc_t* packed_a;    // micro-panels of A
  acc_t* apart;       // the sums that are apart from C
};

// C = A B, or C += A B, where A is [m, k], B is [k, n] and may be packed, and C is [m, n] and
// contiguous. An element of C depends bitwise only on its row of A and its column of B, not on m or
// n. If scalar_t is not the type of sums, an epilogue takes the place of C, which is then
// undefined.
template <typename scalar_t, typename a_t, typename b_t, typename acc_t>
void gemm(int64_t m, int64_t n, int64_t k, Operand<a_t> a, Operand<b_t> b, Write write, acc_t* c,
          const GemmWorkspace<scalar_t>& workspace, const Epilogue<b_t>& epilogue = {});

// Returns the number of elements of `sums` that gemm_rounded needs for at most these sizes; 0 if
// scalar_t is the type of sums.
template <typename scalar_t>
int64_t rounded_sums_size(int64_t m, int64_t n);

// C = A B, summed in acc_t and rounded to scalar_t; neither A nor B is packed. `sums` is used if
// the micro-kernels cannot round.
template <typename scalar_t, typename a_t, typename b_t, typename acc_t>
void gemm_rounded(int64_t m, int64_t n, int64_t k, Operand<a_t> a, Operand<b_t> b, Write write,
                  scalar_t* c, acc_t* sums, const GemmWorkspace<scalar_t>& workspace);

}  // namespace moe_ext::cpu
