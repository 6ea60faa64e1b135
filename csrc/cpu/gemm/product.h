// One GEMM C = A B for the traversals of traversals.h: its operands, its blocks, and the packed
// parts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../../kernels/types.h"
#include "../../math/integers.h"
#include "gemm.h"
#include "micro_kernels.h"
#include "pack_operands.h"

namespace moe_ext::cpu {

// The maximum number of rows of an M-block (MC). Its micro-panels of A for one K-block stay in the
// second cache level.
constexpr int64_t kMC = kFullRateRows;

// The maximum number of K-groups of a K-block (KC); all K-blocks have about the same depth. A
// packed micro-panel of B for one K-block stays in the first cache level while the micro-panels of
// A pass. An element of C is the sum of the sums over the K-blocks.
template <typename acc_t>
constexpr int64_t kKC = 1024 / sizeof(acc_t);

// The depth of a K-block is a multiple of this on every instruction set, so their sums are bitwise
// identical.
constexpr int64_t kKCMultiple = 32;

// The maximum number of K-blocks that WriteOnce packs at once.
constexpr int64_t kMaxKBlocks = 3;

// The size of the columns of B that WriteOnce uses at a time. They stay in the second cache level.
constexpr int64_t kBytesOfB = 512 << 10;

// Gebp keeps sums apart from C up to this depth. A is then packed as a whole.
constexpr int64_t kMaxDepthApart = 16384;

// The distance between rows of sums that are apart from C: an odd number of cache lines, so that a
// column of sums is in all sets of a cache.
inline int64_t ld_apart(int64_t num_columns) { return round_up(num_columns, 32) + 16; }

// The number of columns of C that Axpyf and Dotxf compute at a time; they stay in the first cache
// level.
constexpr int64_t kMaxColumns = 1024;

// A GEMM with at most kMC rows.
template <typename scalar_t, typename a_t, typename b_t>
class Product {
 public:
  using acc_t = acc_type<scalar_t>;
  using scalar_type = scalar_t;
  using b_type = b_t;

  // A part of K and the packed micro-panels of A for it.
  struct KBlock {
    int64_t p, depth, num_groups;
    acc_t* panels_a;
  };

  // Row 0 of this GEMM is row first_row of the matrix that the epilogue sees.
  Product(View<a_t> a, View<b_t> b, int64_t m, int64_t n, int64_t k,
          const GemmWorkspace<scalar_t>& workspace, const Epilogue<b_t>& epilogue,
          int64_t first_row)
      : a(a),
        b(b),
        next_b(view_of_b(epilogue.next_b)),
        epilogue(epilogue),
        first_row(first_row),
        m(m),
        n(n),
        k(k),
        workspace(workspace) {}

  // The number of columns of B that WriteOnce uses at a time.
  int64_t columns_at_once() const {
    const int64_t bytes_of_column = kernels.num_groups(k) * static_cast<int64_t>(sizeof(acc_t));
    return std::max(kBytesOfB / bytes_of_column / nr, int64_t{1}) * nr;
  }

  // The rows of micro-panel i of A; micro-panels with one row more than the others come first.
  int64_t first(int64_t i) const { return i * rows_each_ + std::min(i, num_longer_); }
  int64_t num_rows(int64_t i) const { return first(i + 1) - first(i); }
  acc_t* panel_a(const KBlock& block, int64_t i) const {
    return block.panels_a + i * block.num_groups * kernels.a_panel_width;
  }
  Region region(int64_t i, int64_t j, int64_t num_columns) const {
    return {.row = first_row + first(i),
            .num_rows = num_rows(i),
            .column = j,
            .num_columns = num_columns};
  }

  // Packs the K-blocks of A from `begin` to `end` along K.
  void pack_a(int64_t begin, int64_t end) {
    packed_from_ = begin;
    for (int64_t p = begin; p < end; p += kc) {
      const KBlock block = k_block(p);
      for (int64_t i = 0; i < num_panels; ++i) {
        const int64_t rows = std::min(m - first(i), kernels.a_panel_width);
        packer.pack_a(a, first(i), p, rows, block.depth, panel_a(block, i));
      }
    }
  }

  // Returns the packed K-block at p.
  KBlock k_block(int64_t p) const {
    const int64_t depth = std::min(k - p, kc);
    const int64_t groups_before = (p - packed_from_) / group_size;
    return {.p = p,
            .depth = depth,
            .num_groups = kernels.num_groups(depth),
            .panels_a = workspace.packed_a + groups_before * num_panels * kernels.a_panel_width};
  }

  // Computes a tile: micro-panel i of A times a micro-panel of B.
  void multiply_tile(int64_t i, const acc_t* panel_a, int64_t num_groups, const acc_t* panel_b,
                     int64_t ldb, int64_t num_columns, const Tile<acc_t>& tile,
                     const Prefetch& prefetch, acc_t* packed = nullptr) const {
    const int64_t vectors = ceil_div(num_columns, kernels.lanes);
    const auto kernel = kernels.gemm[vectors - 1][num_rows(i) - 1];
    if (num_columns % kernels.lanes == 0) {
      return kernel(num_groups, panel_a, panel_b, ldb, tile, prefetch, packed);
    }
    kernel(num_groups, panel_a, panel_b, ldb, Tile<acc_t>{.c = workspace.tile, .ldc = nr}, prefetch,
           packed);
    for (int64_t r = 0; r < num_rows(i); ++r) {
      for (int64_t l = 0; l < num_columns; ++l) {
        const acc_t sum = workspace.tile[r * nr + l];
        tile.c[r * tile.ldc + l] = tile.add == nullptr ? sum : tile.add[r * tile.ld_add + l] + sum;
      }
    }
  }

  // Returns the K-groups of numbers that lie along K, or of a row of B.
  static const acc_t* groups(const b_t* numbers) { return reinterpret_cast<const acc_t*>(numbers); }

  static int64_t bytes(int64_t size) { return size * static_cast<int64_t>(sizeof(b_t)); }

  const View<a_t> a;
  const View<b_t> b, next_b;
  const Packer<scalar_t> packer{b.layout};
  const MicroKernels<acc_t>& kernels = packer.kernels;
  const int64_t group_size = kernels.group_size();
  const int64_t nr = kernels.nr();
  const Epilogue<b_t>& epilogue;
  const int64_t first_row;
  const int64_t m, n, k;
  const int64_t num_panels = ceil_div(m, kernels.max_rows);  // micro-panels of A
  // The depth of a K-block.
  const int64_t kc = round_up(ceil_div(k, ceil_div(k, kKC<acc_t>* group_size)), kKCMultiple);
  static_assert(kKCMultiple % Packer<scalar_t>::kTileSize == 0);
  // Whether micro-kernels can read B in place: the tiles by rows, axpyf by rows, and dotxf along K.
  static constexpr bool kSame = std::is_same_v<b_t, acc_t>;
  static constexpr bool kBFloat16 = std::is_same_v<b_t, c10::BFloat16>;
  const bool b_packed = b.layout != nullptr;
  const bool b_in_place =
      kSame && !b_packed && !kernels.pairs && !b.k_contiguous && n % kernels.lanes == 0;
  const bool has_groups =
      (kernels.pairs ? kBFloat16 : kSame) && !b_packed && b.ld % group_size == 0;
  // How B is read if it can be read in place.
  const Reading reading =
      reading_of<scalar_t>(m, b.k_contiguous ? Layout::kAlongK : Layout::kAlongN);
  const GemmWorkspace<scalar_t>& workspace;
  const Prefetch no_prefetch{.data = reinterpret_cast<const char*>(workspace.packed_b),
                             .stride = 0,
                             .row_mask = 0,
                             .shift_rows = 63,
                             .shift_groups = 0,
                             .first = 0};

 private:
  const int64_t rows_each_ = m / num_panels, num_longer_ = m % num_panels;
  int64_t packed_from_ = 0;  // where the packed K-blocks of A begin
};

}  // namespace moe_ext::cpu
