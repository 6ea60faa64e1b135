// The six traversals of a GEMM. Each is a type with a method `run`, which writes C; all have the
// same constructor. gemm.cpp selects the first one that applies; Gebp always does.
//
// Every traversal computes the same sum for an element of C: one chain of multiply-adds along K for
// each K-block. The chains are added in order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "../elementwise.h"
#include "../vectorize.h"
#include "product.h"

namespace moe_ext::cpu {

// Runs the epilogue of some columns, a few rows at a time: what it writes and reads again stays in
// the first cache level.
template <typename Product, typename acc_t>
void run_on_rows(const Product& in, int64_t column, int64_t num_columns, acc_t* sums, int64_t ld) {
  constexpr int64_t kRows = 16;
  for (int64_t r = 0; r < in.m; r += kRows) {
    const Region region{.row = in.first_row + r,
                        .num_rows = std::min(in.m - r, kRows),
                        .column = column,
                        .num_columns = num_columns};
    in.epilogue.run(region, sums + r * ld, ld);
  }
}

// Finishes some columns of C. With bfloat16 pairs, it is faster to run the epilogue on whole rows:
// it runs after the last columns.
template <typename Product, typename acc_t>
void finish_columns(const Product& in, acc_t* c, int64_t column, int64_t num_columns) {
  const int64_t end = column + num_columns;
  if (!in.epilogue.run || (in.kernels.pairs && end < in.n)) return;
  if (in.kernels.pairs) column = 0;
  run_on_rows(in, column, end - column, c + column, in.n);
}

// Multiplies a block of A by one micro-panel of B at a time (GEBP; Goto and van de Geijn, 2008).
// For each K-block, A is packed. For each micro-panel of B, packed or read in place, and for each
// micro-panel of A, a tile is added to C.
//
// An epilogue may take sums that are apart from C, in rows whose distance suits the caches. Then
// all K-blocks of A are packed first. If B is contiguous along K, some of its columns are read as a
// whole, so their sums stay in the second cache level; otherwise all sums of a K-block are
// computed.
template <typename Product>
class Gebp {
 public:
  using acc_t = typename Product::acc_t;
  using b_t = typename Product::b_type;

  explicit Gebp(Product& product) : in_(product) {}

  void run(Write write, acc_t* c) {
    if (keeps_apart()) return run_apart(write, c);
    for (int64_t p = 0; p < in_.k; p += in_.kc, write = Write::kAdd) {
      in_.pack_a(p, std::min(in_.k, p + in_.kc));
      for (int64_t j = 0; j < in_.n; j += in_.nr) {
        const acc_t* add = write == Write::kAdd ? c + j : nullptr;
        multiply_panel(p, {0, in_.n}, j, {.c = c + j, .ldc = in_.n, .add = add, .ld_add = in_.n});
      }
    }
    if (in_.kernels.pairs) finish_columns(in_, c, 0, in_.n);
  }

 private:
  // With at most this many micro-panels of A, packing B costs more than reading it in place each
  // time.
  static constexpr int64_t kMaxPanelsInPlace = 8;

  // Some columns of C.
  struct Columns {
    int64_t begin, end;
  };

  bool keeps_apart() const {
    return in_.kernels.sums_apart && in_.epilogue.run && in_.k <= kMaxDepthApart;
  }

  void run_apart(Write write, const acc_t* c) {
    in_.pack_a(0, in_.k);
    for (int64_t begin = 0; begin < in_.n; begin += columns_apart_) {
      const Columns columns{begin, std::min(in_.n, begin + columns_apart_)};
      acc_t* const sums = in_.workspace.apart;
      for (int64_t p = 0; p < in_.k; p += in_.kc) {
        for (int64_t j = begin; j < columns.end; j += in_.nr) {
          Tile<acc_t> column{.c = sums + j - begin, .ldc = ld_apart_};
          if (p > 0) {
            column.add = column.c;
            column.ld_add = ld_apart_;
          } else if (write == Write::kAdd) {
            column.add = c + j;
            column.ld_add = in_.n;
          }
          multiply_panel(p, columns, j, column);
        }
      }
      run_on_rows(in_, begin, columns.end - begin, sums, ld_apart_);
    }
  }

  // Computes the column of tiles at j, which is one of `columns`, from a micro-panel of B.
  void multiply_panel(int64_t p, Columns columns, int64_t j, const Tile<acc_t>& column) {
    const auto block = in_.k_block(p);
    const int64_t num_columns = std::min(columns.end - j, in_.nr);
    const bool finishes = p + in_.kc >= in_.k && !in_.kernels.pairs;
    auto [panel, ldb] = panel_b(block, j, num_columns);
    // The GEMM of the first micro-panel of A also packs B.
    acc_t* packed =
        in_.b_in_place && in_.num_panels > kMaxPanelsInPlace ? in_.workspace.packed_b : nullptr;
    Prefetch next = prefetch(p, columns, j);
    for (int64_t i = 0; i < in_.num_panels;
         ++i, next.first += block.num_groups >> next.shift_groups) {
      const Region region = in_.region(i, j, num_columns);
      Tile<acc_t> tile = column;
      tile.c += in_.first(i) * tile.ldc;
      if (tile.add != nullptr) tile.add += in_.first(i) * tile.ld_add;
      if (finishes && in_.epilogue.prefetch) in_.epilogue.prefetch(region);
      in_.multiply_tile(i, in_.panel_a(block, i), block.num_groups, panel, ldb, num_columns, tile,
                        i < 1 << next.shift_groups ? next : in_.no_prefetch, packed);
      if (packed != nullptr) {
        panel = std::exchange(packed, nullptr);
        ldb = in_.nr;
      }
      if (finishes && in_.epilogue.run) in_.epilogue.run(region, tile.c, tile.ldc);
    }
  }

  // Returns the micro-panel of B at column j, in place or packed, and its leading dimension.
  std::pair<const acc_t*, int64_t> panel_b(const typename Product::KBlock& block, int64_t j,
                                           int64_t num_columns) {
    if constexpr (std::is_same_v<b_t, acc_t>) {
      if (in_.b_in_place) return {in_.b.at(j, block.p), in_.b.ld};
    }
    in_.packer.pack_b(in_.b, j, block.p, num_columns, block.depth, in_.workspace.packed_b);
    return {in_.workspace.packed_b, in_.nr};
  }

  // What the tiles of the first micro-panels of A prefetch while the micro-panel of B at (p, j) is
  // in use. If B is contiguous along K, they prefetch the next micro-panel of B. Otherwise they
  // prefetch nr * group_size rows of the next kKC columns: the share of this micro-panel.
  Prefetch prefetch(int64_t p, Columns columns, int64_t j) const {
    const int64_t ahead = in_.b.k_contiguous ? in_.nr : kKC<acc_t>;
    int64_t next_p = p, next_j = j / ahead * ahead + ahead;
    if (next_j >= columns.end) next_p += in_.kc, next_j = columns.begin;
    if (next_p >= in_.k) next_p = 0, next_j = columns.end;
    const bool here = next_j < in_.n;
    const View<b_t>& from = here ? in_.b : in_.next_b;
    if (from.data == nullptr) return in_.no_prefetch;
    const int64_t num_rows = from.k_contiguous ? in_.nr : in_.nr * in_.group_size;
    const int64_t row = from.k_contiguous ? 0 : j % kKC<acc_t> * in_.group_size;
    const b_t* data = here ? from.at(next_j, next_p + row) : from.at(0, row);
    return {.data = reinterpret_cast<const char*>(data),
            .stride = Product::bytes(from.ld),
            .row_mask = num_rows - 1,
            .shift_rows = __builtin_ctzll(num_rows),
            .shift_groups = in_.num_panels >= 8   ? 3
                            : in_.num_panels >= 4 ? 2
                            : in_.num_panels >= 2 ? 1
                                                  : 0,
            .first = 0};
  }

  Product& in_;
  // The sums that are apart from C at a time.
  const int64_t columns_apart_ = in_.b.k_contiguous ? std::min(in_.n, kKC<acc_t>) : in_.n;
  const int64_t ld_apart_ = ld_apart(columns_apart_);
};

// Writes each element of C once, without reading it: all K-blocks of a tile are computed at once. C
// is written in row order, which is faster for memory. B is read in place or packed, some columns
// at a time. C may be bfloat16; its sums are then rounded in registers.
template <typename Product, typename c_t>
class WriteOnce {
 public:
  using acc_t = typename Product::acc_t;
  using b_t = typename Product::b_type;

  explicit WriteOnce(Product& product) : in_(product) {}

  static bool applies(const Product& in) {
    if (in.k > kMaxKBlocks * in.kc) return false;
    if (std::is_same_v<c_t, acc_t>) return in.b_in_place;
    // Some micro-kernels can round a tile.
    return std::is_same_v<c_t, c10::BFloat16> && in.kernels.rounds && in.n % in.nr == 0;
  }

  void run(bool non_temporal, c_t* c) {
    in_.pack_a(0, in_.k);
    for (int64_t begin = 0; begin < in_.n; begin += in_.columns_at_once()) {
      const int64_t end = std::min(in_.n, begin + in_.columns_at_once());
      for (int64_t j = begin; !in_.b_in_place && j < end; j += in_.nr) pack_b(j, begin);
      for (int64_t i = 0; i < in_.num_panels; ++i) {
        for (int64_t j = begin; j < end; j += in_.nr) {
          multiply_tile(i, j, begin, std::min(end - j, in_.nr), non_temporal,
                        c + in_.first(i) * in_.n + j);
        }
      }
    }
#if defined(__x86_64__)
    if (non_temporal) __builtin_ia32_sfence();
#endif
  }

 private:
  using KBlock = typename Product::KBlock;

  // The packed micro-panel of B at column j; the first packed column is `begin`.
  acc_t* packed(const KBlock& block, int64_t j, int64_t begin) const {
    return in_.workspace.packed_b + block.p / in_.group_size * in_.columns_at_once() +
           (j - begin) * block.num_groups;
  }

  void pack_b(int64_t j, int64_t begin) {
    for (int64_t p = 0; p < in_.k; p += in_.kc) {
      const KBlock block = in_.k_block(p);
      in_.packer.pack_b(in_.b, j, block.p, std::min(in_.n - j, in_.nr), block.depth,
                        packed(block, j, begin));
    }
  }

  void multiply_tile(int64_t i, int64_t j, int64_t begin, int64_t num_columns, bool non_temporal,
                     c_t* c) {
    const Region region = in_.region(i, j, num_columns);
    if (in_.epilogue.prefetch) in_.epilogue.prefetch(region);
    for (int64_t p = 0; p < in_.k; p += in_.kc) {
      const KBlock block = in_.k_block(p);
      Tile<acc_t> tile{.c = in_.workspace.tile, .ldc = in_.nr};
      if (p > 0) {
        tile.add = in_.workspace.tile;
        tile.ld_add = in_.nr;
      }
      if (p + in_.kc >= in_.k) {
        tile.ldc = in_.n;
        tile.non_temporal = non_temporal;
        if constexpr (std::is_same_v<c_t, acc_t>) {
          tile.c = c;
        } else {
          tile.rounded = c;
        }
      }
      const acc_t* b = packed(block, j, begin);
      int64_t ldb = in_.nr;
      if constexpr (std::is_same_v<b_t, acc_t>) {
        if (in_.b_in_place) b = in_.b.at(j, block.p), ldb = in_.b.ld;
      }
      in_.multiply_tile(i, in_.panel_a(block, i), block.num_groups, b, ldb, num_columns, tile,
                        in_.no_prefetch);
    }
    if constexpr (std::is_same_v<c_t, acc_t>) {
      if (in_.epilogue.run) in_.epilogue.run(region, c, in_.n);
    }
  }

  Product& in_;
};

// The traversals below compute all rows of C at once. Those that read B in place apply if
// selection.h selects their reading, and their kernels have no partial vectors.

// Computes the K-block that ends at `end`, for some columns at a time. multiply(j, num_columns,
// sums, ld) computes the sums of the columns at j, in rows that are ld apart.
template <typename Product, typename acc_t, typename Multiply>
void add_k_block(const Product& in, int64_t end, Write write, acc_t* c, const Multiply& multiply) {
  // A sum that is added to C is first computed separately, as in a tile.
  const bool apart = write == Write::kAdd;
  for (int64_t j = 0; j < in.n; j += kMaxColumns) {
    const int64_t num_columns = std::min(in.n - j, kMaxColumns);
    acc_t* sums = apart ? in.workspace.rows : c + j;
    const int64_t ld = apart ? num_columns : in.n;
    multiply(j, num_columns, sums, ld);
    for (int64_t r = 0; apart && r < in.m; ++r) {
      vectorized<Add>(static_cast<const acc_t*>(sums + r * ld), num_columns, c + r * in.n + j);
    }
    if (end >= in.k) finish_columns(in, c, j, num_columns);
  }
}

// Computes all of C from columns of B that are contiguous along K. All K-blocks of some columns are
// processed in sequence: multiply(j, p, ahead, starts) computes the K-block at p for the columns at
// j, as many as a vector has lanes. `ahead` is what is prefetched meanwhile.
template <typename Product, typename acc_t, typename Multiply>
void dot_columns(const Product& in, Write write, acc_t* c, const Multiply& multiply) {
  const int64_t lanes = in.kernels.lanes;
  for (int64_t begin = 0; begin < in.n; begin += kMaxColumns) {
    const Region region{.row = in.first_row,
                        .num_rows = in.m,
                        .column = begin,
                        .num_columns = std::min(in.n - begin, kMaxColumns)};
    if (!in.kernels.pairs && in.epilogue.prefetch) in.epilogue.prefetch(region);
    for (int64_t j = begin; j < begin + region.num_columns; j += lanes) {
      const auto* ahead = j + lanes < in.n ? in.b.at(j + lanes, 0) : in.next_b.data;
      if (ahead == nullptr) ahead = in.b.at(j, 0);
      for (int64_t p = 0; p < in.k; p += in.kc) {
        multiply(j, p, ahead + p, p == 0 && write != Write::kAdd);
      }
    }
    finish_columns(in, c, begin, region.num_columns);
  }
}

// Computes all of C with the micro-kernel axpyf, which reads the rows of B in place, in sequence.
template <typename Product>
class Axpyf {
 public:
  using acc_t = typename Product::acc_t;
  using b_t = typename Product::b_type;

  explicit Axpyf(Product& product) : in_(product) {}

  static bool applies(const Product& in) {
    return in.reading == Reading::kAxpyf && in.has_groups && in.kernels.axpyf[0] != nullptr &&
           !in.b.k_contiguous && in.n % (in.kernels.lanes * in.group_size) == 0 &&
           in.k % in.group_size == 0;
  }

  void run(Write write, acc_t* c) {
    for (int64_t p = 0; p < in_.k; p += in_.kc, write = Write::kAdd) {
      in_.pack_a(p, std::min(in_.k, p + in_.kc));
      multiply_block(p, write, c);
    }
  }

 private:
  // The rows of B are prefetched into the second cache level this far ahead, kGroupsAtATime
  // K-groups at a time.
  static constexpr int64_t kBytesAhead = 64 << 10;
  static constexpr int64_t kGroupsAtATime = 4;

  void multiply_block(int64_t p, Write write, acc_t* c) {
    const auto block = in_.k_block(p);
    const int64_t size = in_.group_size;
    add_k_block(in_, p + in_.kc, write, c,
                [&](int64_t j, int64_t num_columns, acc_t* sums, int64_t ld) {
                  for (int64_t q = 0; q < block.num_groups; q += groups_ahead_) {
                    const int64_t num_groups = std::min(block.num_groups - q, groups_ahead_);
                    const int64_t first = p + q * size;
                    for (int64_t i = 0; i < in_.num_panels; ++i) {
                      in_.kernels.axpyf[in_.num_rows(i) - 1](
                          num_groups, in_.panel_a(block, i) + q * in_.kernels.a_panel_width,
                          in_.groups(in_.b.at(j, first)), in_.b.ld / size, num_columns,
                          in_.groups(ahead(first, j)), q == 0, sums + in_.first(i) * ld, ld);
                    }
                  }
                });
  }

  // What is prefetched while the rows of B at (p, j) are in use.
  const b_t* ahead(int64_t p, int64_t j) const {
    const int64_t next = p + groups_ahead_ * in_.group_size;
    if (next < in_.k) return in_.b.at(j, next);
    return in_.next_b.data == nullptr ? in_.b.at(j, p) : in_.next_b.at(j, 0);
  }

  Product& in_;
  const int64_t groups_ahead_ =
      round_up(ceil_div(kBytesAhead, Product::bytes(std::min(in_.n, kMaxColumns)) * in_.group_size),
               kGroupsAtATime);
};

// Returns the rows of A as K-groups in the type of B: in place, or converted and filled with zeros.
template <typename Product>
View<typename Product::b_type> rows_of_a(const Product& in) {
  using b_t = typename Product::b_type;
  const int64_t ld = round_up(in.k, in.group_size);
  if constexpr (std::is_same_v<decltype(in.a.data), const b_t*>) {
    if (in.k == ld && in.a.ld % in.group_size == 0) return in.a;
  }
  auto* rows = reinterpret_cast<b_t*>(in.workspace.few_rows_a);
  for (int64_t r = 0; r < in.m; ++r) {
    vectorized<Convert>(in.a.at(r, 0), in.k, rows + r * ld);
    std::fill(rows + r * ld + in.k, rows + (r + 1) * ld, b_t(0));
  }
  return {.data = rows, .ld = ld, .k_contiguous = true};
}

// Computes all of C with the micro-kernel dotxf. A is converted to the type of B first.
template <typename Product>
class Dotxf {
 public:
  using acc_t = typename Product::acc_t;
  using b_t = typename Product::b_type;

  explicit Dotxf(Product& product) : in_(product) {}

  static bool applies(const Product& in) {
    return in.reading == Reading::kDotxf && in.has_groups && in.kernels.dotxf[0] != nullptr &&
           in.a.k_contiguous && in.b.k_contiguous && in.n % in.kernels.lanes == 0 &&
           in.k % (in.kernels.lanes * in.group_size) == 0;
  }

  void run(Write write, acc_t* c) {
    const View<b_t> a = rows_of_a(in_);
    const int64_t size = in_.group_size;
    dot_columns(in_, write, c, [&](int64_t j, int64_t p, const b_t* ahead, bool starts) {
      in_.kernels.dotxf[in_.m - 1](std::min(in_.k - p, in_.kc) / size, in_.groups(a.at(0, p)),
                                   a.ld / size, in_.groups(in_.b.at(j, p)), in_.b.ld / size,
                                   in_.groups(ahead), starts, c + j, in_.n);
    });
  }

 private:
  Product& in_;
};

// Writes the columns of A [m, k] as rows of floats, rounded to half_t if A `rounds`.
template <typename half_t>
struct ColumnsOfFloats {
  template <typename a_t>
  MOE_EXT_KERNEL void run(const a_t* a, int64_t ld, int64_t m, int64_t k, bool rounds, float* to) {
    for (int64_t r = 0; r < m; ++r) {
      for (int64_t p = 0; p < k; ++p) {
        const auto number = static_cast<float>(a[r * ld + p]);
        to[p * m + r] = rounds ? static_cast<float>(half_t(number)) : number;
      }
    }
  }
};

// Writes numbers as floats that are rounded to half_t.
template <typename half_t>
struct RowsOfFloats {
  template <typename a_t>
  MOE_EXT_KERNEL void run(const a_t* from, int64_t size, float* to) {
    for (int64_t i = 0; i < size; ++i) to[i] = static_cast<float>(static_cast<half_t>(from[i]));
  }
};

// Computes all of C with the kernels for few rows of A and a B whose numbers are converted, in the
// order of Axpyf or Dotxf.
template <typename Product>
class FewRowsWidened {
 public:
  using acc_t = typename Product::acc_t;
  using b_t = typename Product::b_type;

  explicit FewRowsWidened(Product& product) : in_(product) {}

  static bool applies(const Product& in) {
    if (kernels_of(in) == nullptr) return false;
    if (in.reading == Reading::kAxpyf) return !in.b.k_contiguous && in.n % kWidenedDepth == 0;
    return in.reading == Reading::kDotxf && in.b.k_contiguous && in.n % in.kernels.lanes == 0 &&
           in.b.ld % 2 == 0;
  }

  void run(Write write, acc_t* c) {
    if constexpr (sizeof(b_t) == 2) {
      vectorized<ColumnsOfFloats<b_t>>(in_.a.data, in_.a.ld, in_.m, in_.k, kernels_->rounds_a,
                                       in_.workspace.few_rows_a);
      in_.b.k_contiguous ? read_columns(write, c) : read_rows(write, c);
    }
  }

 private:
  // The kernels that read A by rows, and B in half precision; or null.
  static const WidenedKernels<b_t>* kernels_of(const Product& in) {
    if constexpr (sizeof(b_t) == 2 && std::is_same_v<b_t, typename Product::scalar_type>) {
      if (!in.b_packed && in.a.k_contiguous && in.k % kWidenedDepth == 0) {
        return widened_kernels<b_t>();
      }
    }
    return nullptr;
  }

  // A has one row of floats for each number along K.
  const acc_t* a(int64_t p) const { return in_.workspace.few_rows_a + p * in_.m; }

  void read_rows(Write write, acc_t* c) {
    for (int64_t p = 0; p < in_.k; p += in_.kc, write = Write::kAdd) {
      const int64_t end = std::min(in_.k, p + in_.kc);
      add_k_block(in_, end, write, c, [&](int64_t j, int64_t num_columns, acc_t* sums, int64_t ld) {
        for (int64_t q = p; q < end; q += kWidenedDepth) {
          const int64_t next = q + kWidenedDepth;
          const b_t* ahead = next < end ? in_.b.at(j, next) : after(p, end, j);
          kernels_->axpyf[in_.m - 1](a(q), in_.b.at(j, q), in_.b.ld, num_columns, ahead, q == p,
                                     sums, ld);
        }
      });
    }
  }

  void read_columns(Write write, acc_t* c) {
    dot_columns(in_, write, c, [&](int64_t j, int64_t p, const b_t* ahead, bool starts) {
      kernels_->dotxf[in_.m - 1](std::min(in_.k - p, in_.kc), a(p), in_.b.at(j, p), in_.b.ld, ahead,
                                 starts, c + j, in_.n);
    });
  }

  // The rows of B that are read after the columns at j of a K-block.
  const b_t* after(int64_t p, int64_t end, int64_t j) const {
    if (j + kMaxColumns < in_.n) return in_.b.at(j + kMaxColumns, p);
    if (end < in_.k) return in_.b.at(0, end);
    return in_.next_b.data == nullptr ? in_.b.at(j, p) : in_.next_b.at(0, 0);
  }

  Product& in_;
  const WidenedKernels<b_t>* const kernels_ = kernels_of(in_);
};

// Computes all of C from the codes of B, for few rows of A: no number of B is written to memory.
template <typename Product>
class FewRowsOfCodes {
 public:
  using acc_t = typename Product::acc_t;

  explicit FewRowsOfCodes(Product& product) : in_(product) {}

  static bool applies(const Product& in) { return kernel_of(in) != nullptr; }

  void run(Write write, acc_t* c) {
    const View<acc_t> a = k_groups_of_a();
    const int64_t whole = in_.n / kPanelOutputs, rest = in_.n % kPanelOutputs;
    multiply(a, 0, whole, write, c, in_.n);
    if (rest > 0) {
      acc_t last[kMaxFewRows * kPanelOutputs] = {};
      for (int64_t r = 0; write == Write::kAdd && r < in_.m; ++r) {
        std::copy_n(c + r * in_.n + in_.n - rest, rest, last + r * kPanelOutputs);
      }
      multiply(a, whole, 1, write, last, kPanelOutputs);
      for (int64_t r = 0; r < in_.m; ++r) {
        std::copy_n(last + r * kPanelOutputs, rest, c + r * in_.n + in_.n - rest);
      }
    }
    finish_columns(in_, c, 0, in_.n);
  }

 private:
  using b_t = typename Product::b_type;

  // The kernel for the rows of A and the codes of B; null if there is none.
  static FewRowsKernel kernel_of(const Product& in) {
    if (!in.b_packed || in.b.k_contiguous || !in.a.k_contiguous) return nullptr;
    for (int i = 0; i < kNumFewRows; ++i) {
      if (in.m <= int64_t{1} << i) return in.packer.code_kernels.few_rows.kernels[i];
    }
    return nullptr;
  }

  // Returns the rows of A as K-groups of the kernel.
  View<acc_t> k_groups_of_a() const {
    const FewRowsKernels& kernels = in_.packer.code_kernels.few_rows;
    if constexpr (std::is_same_v<decltype(in_.a.data), const acc_t*>) {
      if (!kernels.pairs && !kernels.rounds_a) return in_.a;
    }
    if (kernels.pairs) {
      const View<b_t> rows = rows_of_a(in_);
      return {.data = in_.groups(rows.data), .ld = rows.ld / in_.group_size, .k_contiguous = true};
    }
    float* const floats = in_.workspace.few_rows_a;
    for (int64_t r = 0; r < in_.m; ++r) {
      vectorized<RowsOfFloats<b_t>>(in_.a.at(r, 0), in_.k, floats + r * in_.k);
    }
    return {.data = floats, .ld = in_.k, .k_contiguous = true};
  }

  void multiply(const View<acc_t>& a, int64_t first_panel, int64_t num_panels, Write write,
                acc_t* c, int64_t ldc) {
    const PackedLayout& layout = *in_.b.layout;
    kernel_(layout, in_.b.panels + first_panel * layout.panel_bytes(), num_panels,
            in_.next_b.panels, in_.kc, a.data, a.ld, in_.m, write == Write::kAdd, c, ldc);
  }

  Product& in_;
  const FewRowsKernel kernel_ = kernel_of(in_);
};

}  // namespace moe_ext::cpu
