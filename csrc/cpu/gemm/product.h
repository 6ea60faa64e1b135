// One GEMM C = A B for the traversals of traversals.h: its operands, its blocks, and the packed
// parts.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "../../kernels/types.h"
#include "../../math/integers.h"
#include "../elementwise.h"
#include "gemm.h"
#include "micro_kernels.h"
#include "packing.h"
#include "unpacking.h"

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

// The number of columns of C that Axpyf and Dotxf compute at a time; they stay in the first cache
// level.
constexpr int64_t kMaxColumns = 1024;

// The number of elements of a K-group, the columns of a tile, and the K-groups of a depth.
template <typename acc_t>
int64_t group_size_of(const MicroKernels<acc_t>& kernels) {
  return kernels.pairs ? 2 : 1;
}
template <typename acc_t>
int64_t nr_of(const MicroKernels<acc_t>& kernels) {
  return kMaxTileVectors * kernels.lanes;
}
template <typename acc_t>
int64_t num_groups_of(const MicroKernels<acc_t>& kernels, int64_t depth) {
  return round_up(ceil_div(depth, group_size_of(kernels)), kernels.group_multiple);
}

// An operand as the micro-panels see it: element (i, p) is in row or column i of the micro-panels
// and at p along K.
template <typename T>
struct View {
  const T* data;
  int64_t ld;
  bool k_contiguous;
  const PackedLayout* layout = nullptr;  // of a packed operand
  const uint8_t* panels = nullptr;

  const T* at(int64_t i, int64_t p) const {
    return data + (k_contiguous ? i * ld + p : p * ld + i);
  }
};

template <typename T>
View<T> view_of_a(const Operand<T>& a) {
  return {.data = a.data, .ld = a.ld, .k_contiguous = !a.transposed};
}

template <typename T>
View<T> view_of_b(const Operand<T>& b) {
  return {.data = b.data,
          .ld = b.ld,
          .k_contiguous = b.transposed,
          .layout = b.layout,
          .panels = b.panels};
}

// Calls PackMicroPanel::run with the vectors of the instruction set in use.
template <typename acc_t, typename T>
void pack_micro_panel(bool pairs, const View<T>& view, int64_t i, int64_t p, int64_t num_columns,
                      int64_t depth, int64_t num_groups, int64_t width, bool by_columns,
                      acc_t* to) {
  const T* from = view.at(i, p);
  const auto arguments = [&](auto run) {
    run(from, view.ld, view.k_contiguous, num_columns, depth, num_groups, width, by_columns, to);
  };
#if defined(__x86_64__)
  if constexpr (std::is_same_v<acc_t, float>) {
    if (pairs) return arguments([](auto... all) { run_avx512<PackMicroPanel<Pairs<64>>>(all...); });
  }
  if (isa() >= Isa::kAvx512) {
    return arguments([](auto... all) { run_avx512<PackMicroPanel<Groups<64, acc_t>>>(all...); });
  }
  if (isa() == Isa::kAvx2) {
    return arguments([](auto... all) { run_avx2<PackMicroPanel<Groups<32, acc_t>>>(all...); });
  }
#else
  if constexpr (std::is_same_v<acc_t, float>) {
    if (pairs) return arguments([](auto... all) { PackMicroPanel<Pairs<16>>::run(all...); });
  }
#endif
  arguments([](auto... all) { PackMicroPanel<Groups<16, acc_t>>::run(all...); });
}

// Packs a micro-panel of a packed B, as pack_micro_panel does, with numbers rounded to scalar_t.
template <typename scalar_t, typename acc_t, typename T>
void pack_micro_panel_of_codes(bool pairs, const View<T>& view, int64_t j, int64_t p,
                               int64_t num_columns, int64_t depth, int64_t num_groups,
                               int64_t width, acc_t* to) {
  const PackedLayout& layout = *view.layout;
  const CodeKernels kernels = code_kernels<scalar_t>(*layout.format);
  const auto panel_of = [&](int64_t output) {
    return view.panels + output / kPanelOutputs * layout.panel_bytes();
  };
  if constexpr (std::is_same_v<acc_t, float>) {
    // B = W: unpack the panels into their places.
    const auto unpack = pairs ? kernels.unpack_pairs : kernels.unpack;
    if (!view.k_contiguous && unpack != nullptr && width % kPanelOutputs == 0 &&
        depth % kPackedInputs == 0 && num_groups * (pairs ? 2 : 1) == depth) {
      for (int64_t i = 0; i < num_columns; i += kPanelOutputs) {
        const PanelInputs inputs{.panel = panel_of(j + i), .first = p, .size = depth};
        PanelInputs next = inputs;
        next.panel += layout.panel_bytes();
        unpack(layout, inputs, next, to + i, width);
      }
      return;
    }
  }
  // Otherwise unpack a tile at a time, and pack it.
  constexpr int64_t kSize = 2 * kPanelOutputs;  // of a tile, along K and as the most columns
  static_assert(kSize == kKCMultiple);
  constexpr int64_t kTile = (kSize + kPackedInputs) * kSize;
  float tile alignas(64)[kTile];
  constexpr bool kBFloat16 = std::is_same_v<scalar_t, c10::BFloat16>;
  c10::BFloat16 rounded alignas(64)[kBFloat16 ? kTile : 1];
  const bool rounds = kBFloat16 && kernels.unpack_rounded != nullptr;
  const auto unpack = rounds ? kernels.unpack_rounded : kernels.unpack;
  const int64_t groups_of_tile = kSize / (pairs ? 2 : 1);
  for (int64_t done = 0; done < depth; done += kSize, num_groups -= groups_of_tile) {
    const int64_t depth_of_tile = std::min(depth - done, kSize);
    // The part of W [inputs, outputs]. If B = W^T, K runs along the outputs.
    const int64_t input = view.k_contiguous ? j : p + done;
    const int64_t output = view.k_contiguous ? p + done : j;
    const int64_t num_outputs = view.k_contiguous ? depth_of_tile : num_columns;
    const int64_t first_input = input / kPackedInputs * kPackedInputs;
    const int64_t first_output = output / kPanelOutputs * kPanelOutputs;
    const int64_t num_inputs = view.k_contiguous ? num_columns : depth_of_tile;
    const int64_t num_rows = input + num_inputs - first_input;
    for (int64_t o = 0; first_output + o < output + num_outputs; o += kPanelOutputs) {
      const PanelInputs inputs{
          .panel = panel_of(first_output + o), .first = first_input, .size = num_rows};
      PanelInputs next = inputs;  // of the next tile, or if B = W^T of the next micro-panel
      next.first += num_inputs;
      unpack(layout, inputs, next, rounds ? static_cast<void*>(rounded + o) : tile + o, kSize);
    }
    const auto pack = [&](const auto* numbers) {
      const View<std::decay_t<decltype(*numbers)>> part{
          .data = numbers + (input - first_input) * kSize + output - first_output,
          .ld = kSize,
          .k_contiguous = view.k_contiguous};
      pack_micro_panel(pairs, part, 0, 0, num_columns, depth_of_tile,
                       std::min(num_groups, groups_of_tile), width, /*by_columns=*/false,
                       to + done / (pairs ? 2 : 1) * width);
    };
    if (rounds) {
      pack(static_cast<const c10::BFloat16*>(rounded));
    } else {
      pack(static_cast<const float*>(tile));
    }
  }
}

// A GEMM with at most kMC rows.
template <typename scalar_t, typename a_t, typename b_t>
class Product {
 public:
  using acc_t = acc_type<scalar_t>;
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

  // Whether WriteOnce can compute C, in acc_t or rounded to scalar_t.
  bool writes_once(bool rounded) const {
    if (k > kMaxKBlocks * kc) return false;
    if (!rounded) return b_in_place;
    return std::is_same_v<scalar_t, c10::BFloat16> && kernels.rounds && n % nr == 0;
  }

  // The number of columns of B that WriteOnce uses at a time.
  int64_t columns_at_once() const {
    const int64_t bytes_of_column = num_groups(k) * static_cast<int64_t>(sizeof(acc_t));
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

  // Packs the micro-panel of B at column j and a part of K.
  void pack_b(int64_t j, int64_t p, int64_t num_columns, int64_t depth, int64_t num_groups,
              acc_t* to) const {
    if (b_packed) {
      pack_micro_panel_of_codes<scalar_t>(kernels.pairs, b, j, p, num_columns, depth, num_groups,
                                          nr, to);
    } else {
      pack_micro_panel(kernels.pairs, b, j, p, num_columns, depth, num_groups, nr,
                       /*by_columns=*/false, to);
    }
  }

  // Packs A from p to end along K into k_blocks.
  void pack_a(int64_t p, int64_t end) {
    size_t count = 0;
    acc_t* panels = workspace.packed_a;
    for (; p < end; p += kc) {
      const int64_t depth = std::min(end - p, kc);
      const KBlock block{
          .p = p, .depth = depth, .num_groups = num_groups(depth), .panels_a = panels};
      for (int64_t i = 0; i < num_panels; ++i) {
        const int64_t rows = std::min(m - first(i), kernels.a_panel_width);
        pack_micro_panel(kernels.pairs, a, first(i), p, rows, depth, block.num_groups,
                         kernels.a_panel_width, kernels.a_in_row_blocks, panel_a(block, i));
      }
      panels = panel_a(block, num_panels);
      packed_k_blocks_.at(count++) = block;
    }
    k_blocks = std::span(packed_k_blocks_).first(count);
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

  const MicroKernels<acc_t>& kernels = micro_kernels<scalar_t, acc_t>();
  const int64_t group_size = group_size_of(kernels);
  const int64_t nr = nr_of(kernels);
  const View<a_t> a;
  const View<b_t> b, next_b;
  const Epilogue<b_t>& epilogue;
  const int64_t first_row;
  const int64_t m, n, k;
  const int64_t num_panels = ceil_div(m, kernels.max_rows);  // micro-panels of A
  // The depth of a K-block.
  const int64_t kc = round_up(ceil_div(k, ceil_div(k, kKC<acc_t>* group_size)), kKCMultiple);
  // Whether micro-kernels can read B in place: the tiles by rows, axpyf by rows, and dotxf along K.
  static constexpr bool kSame = std::is_same_v<b_t, acc_t>;
  static constexpr bool kBFloat16 = std::is_same_v<b_t, c10::BFloat16>;
  const bool b_packed = b.layout != nullptr;
  const bool b_in_place =
      kSame && !b_packed && !kernels.pairs && !b.k_contiguous && n % kernels.lanes == 0;
  const bool has_groups =
      (kernels.pairs ? kBFloat16 : kSame) && !b_packed && b.ld % group_size == 0;
  const bool adds_rows = has_groups && kernels.axpyf[0] != nullptr && !b.k_contiguous &&
                         n % (kernels.lanes * group_size) == 0 && k % group_size == 0;
  const bool dots_rows = has_groups && kernels.dotxf[0] != nullptr && a.k_contiguous &&
                         b.k_contiguous && n % kernels.lanes == 0 &&
                         k % (kernels.lanes * group_size) == 0;
  // The same for a B of half precision whose numbers are converted. These kernels read A by rows.
  const WidenedKernels<b_t>* widened = kernels_of_widened();
  const bool adds_widened = widened != nullptr && !b.k_contiguous && n % kWidenedDepth == 0;
  const bool dots_widened =
      widened != nullptr && b.k_contiguous && n % kernels.lanes == 0 && b.ld % 2 == 0;
  // How B is read if it can be read in place.
  const Reading reading =
      reading_of<scalar_t>(m, b.k_contiguous ? Layout::kAlongK : Layout::kAlongN);
  const FewRowsKernels few_rows_kernels = b_packed && !b.k_contiguous && a.k_contiguous
                                              ? code_kernels<scalar_t>(*b.layout->format).few_rows
                                              : FewRowsKernels{};
  // The kernel for the rows of A and the codes of B; null if there is none.
  const FewRowsKernel few_rows_of_codes = kernel_of_few_rows();
  std::span<const KBlock> k_blocks;  // the packed K-blocks of A
  const GemmWorkspace<scalar_t>& workspace;
  const Prefetch no_prefetch{.data = reinterpret_cast<const char*>(workspace.packed_b),
                             .stride = 0,
                             .row_mask = 0,
                             .shift_rows = 63,
                             .shift_groups = 0,
                             .first = 0};

 private:
  using Kernels = MicroKernels<acc_t>;

  FewRowsKernel kernel_of_few_rows() const {
    for (int i = 0; i < kNumFewRows; ++i) {
      if (m <= int64_t{1} << i) return few_rows_kernels.kernels[i];
    }
    return nullptr;
  }

  const WidenedKernels<b_t>* kernels_of_widened() const {
    if constexpr (sizeof(scalar_t) == 2 && std::is_same_v<b_t, scalar_t>) {
      if (!b_packed && a.k_contiguous && k % kWidenedDepth == 0) return widened_kernels<b_t>();
    }
    return nullptr;
  }

  int64_t num_groups(int64_t depth) const { return num_groups_of(kernels, depth); }

  const int64_t rows_each_ = m / num_panels, num_longer_ = m % num_panels;
  std::array<KBlock, kMaxKBlocks> packed_k_blocks_;
};

}  // namespace moe_ext::cpu
