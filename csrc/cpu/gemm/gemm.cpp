#include "gemm.h"

#include <ATen/ceil_div.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "../elementwise.h"
#include "../vectorize.h"
#include "micro_kernels.h"
#include "packing.h"

namespace moe_ext::cpu {
namespace {

// An element of C is a sum of the sums of squares of B, kSquare words deep at most, all about the
// same. A panel of B in a square, packed, stays in the first cache level while it meets the panels
// of A, of kMaxRows rows; those stay in the second. Where B's rows are contiguous the first panel
// of A packs it on the way; few panels of A are not worth packing it.
template <typename acc_t>
constexpr int64_t kSquare = 1024 / sizeof(acc_t);
constexpr int64_t kDepthStep = 32;  // of all instruction sets, so that their sums are the same
constexpr int64_t kMaxRows = 640;
constexpr int64_t kFewPanels = 8;

// C that streams past the caches is written in the order of its rows, which memory likes, with all
// squares of an element in work at a time: so many. So many bytes of B stay in the second cache
// level then.
constexpr int64_t kMaxSquares = 3;
constexpr int64_t kBytesAlong = 512 << 10;

// Where B is read by rows, so many columns of C are in work at a time, so that they stay in the
// first cache level, and B's rows are fetched there so far ahead, some at a time.
constexpr int64_t kMaxColumns = 1024;
constexpr int64_t kBytesAhead = 16 << 10;
constexpr int64_t kRowsAtATime = 4;

// A factor as a stack of panels: element (i, p) of it, i across the panels and p in their depth.
template <typename T>
struct Source {
  const T* data;
  int64_t stride;
  bool depth_contiguous;

  const T* at(int64_t i, int64_t p) const {
    return data + (depth_contiguous ? i * stride + p : p * stride + i);
  }
};

// pack_panel with the vectors of the instruction set in use.
template <typename acc_t, typename from_t>
void pack_panel(bool pairs, const Source<from_t>& source, int64_t i, int64_t p, int64_t num_columns,
                int64_t depth, int64_t num_words, int64_t width, bool by_columns, acc_t* to) {
  const from_t* from = source.at(i, p);
  const auto arguments = [&](auto run) {
    run(from, source.stride, source.depth_contiguous, num_columns, depth, num_words, width,
        by_columns, to);
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
#endif
  arguments([](auto... all) { PackMicroPanel<Groups<16, acc_t>>::run(all...); });
}

// The product for at most kMaxRows rows.
template <typename scalar_t, typename a_t, typename b_t>
class Product {
 public:
  using acc_t = at::opmath_type<scalar_t>;

  // Its first row is row first_row of what `beside` is about.
  Product(Source<a_t> a, Source<b_t> b, int64_t m, int64_t n, int64_t k, acc_t* space,
          const Beside<b_t>& beside, Source<b_t> next, int64_t first_row)
      : a_(a),
        b_(b),
        next_(next),
        beside_(beside),
        first_row_(first_row),
        m_(m),
        n_(n),
        k_(k),
        tile_(space),
        sums_(tile_ + tile_size()),
        packed_b_(sums_ + sums_size(n)),
        packed_a_(packed_b_ + panel_size(k)) {}

  // For a product whose m, n and k are at most `largest`.
  static int64_t space(int64_t largest) {
    return tile_size() + sums_size(largest) + panel_size(largest) + panels_size(largest, largest);
  }

  void run(Write write, acc_t* c) {
    const bool streams =
        write == Write::kStream && readable_ && !by_rows_ && k_ <= kMaxSquares * depth_;
    if (write == Write::kStream && !streams) write = Write::kReplace;
    if (few_ && transposable_) return columns_of_b(write, c);
    if (kernels_.begin != nullptr) kernels_.begin();
    const int64_t at_a_time = streams ? kMaxSquares * depth_ : depth_;
    for (int64_t p = 0; p < k_; p += at_a_time, write = Write::kAdd) {
      pack_a(p, std::min(k_, p + at_a_time));
      last_ = p + at_a_time >= k_;
      if (by_rows_) {
        rows_of_b(write, c);
      } else if (streams) {
        stream(c);
      } else {
        for (int64_t j = 0; j < n_; j += width_) panel_of_b(j, write, c + j);
      }
    }
    if (kernels_.end != nullptr) kernels_.end();
    // Products of pairs are so fast that it pays to go by whole rows afterwards.
    if (kernels_.pairs && beside_.finish) beside_.finish({first_row_, m_, 0, n_});
#if defined(__x86_64__)
    if (streams) __builtin_ia32_sfence();
#endif
  }

 private:
  static constexpr int64_t kSize = kSquare<acc_t>;

  // What is multiplied at a time of the depth of the product.
  struct Square {
    int64_t p, depth, num_words;
    acc_t* panels_a;
  };

  static const MicroKernels<acc_t>& kernels() { return micro_kernels<scalar_t, acc_t>(); }
  static int64_t width() { return kMaxTileVectors * kernels().lanes; }
  static int64_t numbers() { return kernels().pairs ? 2 : 1; }  // in a word
  static int64_t words(int64_t depth) {
    return at::round_up(at::ceil_div(depth, numbers()), kernels().group_multiple);
  }

  static int64_t tile_size() { return kernels().max_rows * width(); }
  static int64_t sums_size(int64_t n) {
    return kMaxFewRows * at::round_up(std::min(n, kMaxColumns), width());
  }
  static int64_t deepest(int64_t k) { return std::min(kMaxSquares * kSize, words(k)); }
  static int64_t panel_size(int64_t k) { return std::min(kSize, words(k)) * width(); }
  static int64_t panels_size(int64_t m, int64_t k) {
    return at::ceil_div(std::min(m, kMaxRows), kernels().max_rows) * kernels().a_panel_width *
           deepest(k);
  }

  int64_t num_squares() const { return at::ceil_div(k_, kSize * numbers_); }

  // The first row of a panel of a: those with a row more than the others come first.
  int64_t first(int64_t panel) const { return panel * rows_each_ + std::min(panel, num_longer_); }
  int64_t num_rows(int64_t panel) const { return first(panel + 1) - first(panel); }
  acc_t* panel_a(const Square& square, int64_t i) const {
    return square.panels_a + i * square.num_words * kernels_.a_panel_width;
  }

  // The squares from p to end, and a's panels of them.
  void pack_a(int64_t p, int64_t end) {
    squares_.clear();
    acc_t* panels = packed_a_;
    for (; p < end; p += depth_) {
      const int64_t depth = std::min(end - p, depth_);
      const Square square{p, depth, words(depth), panels};
      for (int64_t i = 0; i < num_panels_; ++i) {
        const int64_t rows = std::min(m_ - first(i), kernels_.a_panel_width);
        pack_panel(kernels_.pairs, a_, first(i), p, rows, depth, square.num_words,
                   kernels_.a_panel_width, kernels_.a_in_row_blocks, panel_a(square, i));
      }
      panels = panel_a(square, num_panels_);
      squares_.push_back(square);
    }
  }

  // b's panel of the square, at column j, as it is or packed: where it starts and its stride.
  std::pair<const acc_t*, int64_t> panel_b(const Square& square, int64_t j, int64_t num_columns) {
    if constexpr (std::is_same_v<b_t, acc_t>) {
      if (readable_) return {b_.at(j, square.p), b_.stride};
    }
    pack_panel(kernels_.pairs, b_, j, square.p, num_columns, square.depth, square.num_words, width_,
               /*by_columns=*/false, packed_b_);
    return {packed_b_, width_};
  }

  // The columns of c by the panel of b at column j in the square.
  void panel_of_b(int64_t j, Write write, acc_t* c) {
    const Square& square = squares_.front();
    const int64_t num_columns = std::min(n_ - j, width_);
    const bool finishing = last_ && !kernels_.pairs;
    auto [panel, stride] = panel_b(square, j, num_columns);
    acc_t* packed = readable_ && num_panels_ > kFewPanels ? packed_b_ : nullptr;
    Prefetch next = prefetch(square.p, j);
    for (int64_t i = 0; i < num_panels_; ++i, next.first += square.num_words >> next.shift_groups) {
      const Region region{first_row_ + first(i), num_rows(i), j, num_columns};
      Tile<acc_t> out{c + first(i) * n_, n_};
      if (write == Write::kAdd) {
        out.add = out.c;
        out.ld_add = n_;
      }
      if (finishing && beside_.prepare) beside_.prepare(region);
      tile(i, panel_a(square, i), square.num_words, panel, stride, num_columns, out,
           i < 1 << next.shift_groups ? next : none_, packed);
      if (packed != nullptr) {
        panel = std::exchange(packed, nullptr);
        stride = width_;
      }
      if (finishing && beside_.finish) beside_.finish(region);
    }
  }

  // All of c, past the caches. b is read where it is, some columns at a time.
  void stream(acc_t* c) {
    if constexpr (std::is_same_v<b_t, acc_t>) {
      const int64_t bytes_of_column = k_ * static_cast<int64_t>(sizeof(acc_t));
      const int64_t columns = std::max(kBytesAlong / bytes_of_column / width_, int64_t{1}) * width_;
      for (int64_t begin = 0; begin < n_; begin += columns) {
        const int64_t end = std::min(n_, begin + columns);
        for (int64_t i = 0; i < num_panels_; ++i) {
          for (int64_t j = begin; j < end; j += width_) {
            stream_tile(i, j, std::min(end - j, width_), c + first(i) * n_ + j);
          }
        }
      }
    }
  }

  // The rows of panel i of a times the columns of b at j.
  void stream_tile(int64_t i, int64_t j, int64_t num_columns, acc_t* c) {
    const Region region{first_row_ + first(i), num_rows(i), j, num_columns};
    if (beside_.prepare) beside_.prepare(region);
    for (const Square& square : squares_) {
      const bool ends = &square == &squares_.back();
      Tile<acc_t> out = ends ? Tile<acc_t>{c, n_} : Tile<acc_t>{tile_, width_};
      if (&square != &squares_.front()) {
        out.add = tile_;
        out.ld_add = width_;
      }
      out.non_temporal = ends;
      tile(i, panel_a(square, i), square.num_words, b_.at(j, square.p), b_.stride, num_columns, out,
           none_);
    }
    if (beside_.finish) beside_.finish(region);
  }

  // All of c by rows of b in the square, read where they are, one after the other. What is added to
  // c is summed apart, as it is in a tile.
  void rows_of_b(Write write, acc_t* c) {
    if constexpr (std::is_same_v<b_t, acc_t>) {
      const Square& square = squares_.front();
      const bool apart = write == Write::kAdd;
      for (int64_t j = 0; j < n_; j += kMaxColumns) {
        const int64_t num_columns = std::min(n_ - j, kMaxColumns);
        acc_t* sums = apart ? sums_ : c + j;
        const int64_t stride = apart ? num_columns : n_;
        for (int64_t q = 0; q < square.depth; q += rows_ahead_) {
          const int64_t num_words = std::min(square.depth - q, rows_ahead_);
          for (int64_t i = 0; i < num_panels_; ++i) {
            kernels_.axpyf[num_rows(i) - 1](
                num_words, panel_a(square, i) + q * kernels_.a_panel_width, b_.at(j, square.p + q),
                b_.stride, num_columns, ahead(square.p + q, j), q == 0, sums + first(i) * stride,
                stride);
          }
        }
        for (int64_t r = 0; apart && r < m_; ++r) {
          vectorized<Add>(static_cast<const acc_t*>(sums + r * stride), num_columns,
                          c + r * n_ + j);
        }
        if (last_ && beside_.finish) beside_.finish({first_row_, m_, j, num_columns});
      }
    }
  }

  // The same of a transposed b by its columns, all the squares of some of them after each other.
  void columns_of_b(Write write, acc_t* c) {
    if constexpr (std::is_same_v<a_t, acc_t> && std::is_same_v<b_t, acc_t>) {
      for (int64_t begin = 0; begin < n_; begin += kMaxColumns) {
        const Region region{first_row_, m_, begin, std::min(n_ - begin, kMaxColumns)};
        if (beside_.prepare) beside_.prepare(region);
        for (int64_t j = begin; j < begin + region.num_columns; j += kernels_.lanes) {
          const bool last = j + kernels_.lanes >= n_;
          const acc_t* ahead = !last ? b_.at(j + kernels_.lanes, 0) : next_.data;
          if (ahead == nullptr) ahead = b_.at(j, 0);
          for (int64_t p = 0; p < k_; p += depth_) {
            const bool starts = p == 0 && write != Write::kAdd;
            kernels_.dotxf[m_ - 1](std::min(k_ - p, depth_), a_.at(0, p), a_.stride, b_.at(j, p),
                                   b_.stride, ahead + p * kernels_.lanes, starts, c + j, n_);
          }
        }
        if (beside_.finish) beside_.finish(region);
      }
    }
  }

  // What is fetched while the rows of b at (p, j) are in use.
  const b_t* ahead(int64_t p, int64_t j) const {
    if (p + rows_ahead_ < k_) return b_.at(j, p + rows_ahead_);
    return next_.data == nullptr ? b_.at(j, p) : next_.at(j, 0);
  }

  // What is fetched while the panel of b at (p, j) is in use, in the tiles of the first panels of
  // a: of the square after this one as many rows as there are panels of b in a square; or a panel,
  // if b is transposed.
  Prefetch prefetch(int64_t p, int64_t j) const {
    const int64_t ahead = b_.depth_contiguous ? width_ : kSize;
    int64_t next_p = p, next_j = j / ahead * ahead + ahead;
    if (next_j >= n_) next_p = squares_.back().p + depth_, next_j = 0;
    const bool here = next_p < k_;
    const Source<b_t>& from = here ? b_ : next_;
    if (from.data == nullptr) return none_;
    const int64_t num_rows = from.depth_contiguous ? width_ : width_ * numbers_;
    const int64_t row = from.depth_contiguous ? 0 : j % kSize * numbers_;
    const b_t* data = here ? from.at(next_j, next_p + row) : from.at(0, row);
    const int slowness = num_panels_ >= 8 ? 3 : num_panels_ >= 4 ? 2 : num_panels_ >= 2 ? 1 : 0;
    return {reinterpret_cast<const char*>(data), bytes(from.stride), num_rows - 1,
            __builtin_ctzll(num_rows),           slowness,           0};
  }

  static int64_t bytes(int64_t size) { return size * static_cast<int64_t>(sizeof(b_t)); }

  bool is_whole(int64_t num_columns) const { return num_columns % kernels_.lanes == 0; }

  // The rows of panel i of a times a panel of b.
  void tile(int64_t i, const acc_t* panel_a, int64_t num_words, const acc_t* panel_b,
            int64_t stride_b, int64_t num_columns, const Tile<acc_t>& out, const Prefetch& prefetch,
            acc_t* packed = nullptr) {
    const int64_t vectors = at::ceil_div(num_columns, kernels_.lanes);
    const auto multiply = kernels_.gemm[vectors - 1][num_rows(i) - 1];
    if (is_whole(num_columns)) {
      return multiply(num_words, panel_a, panel_b, stride_b, out, prefetch, packed);
    }
    multiply(num_words, panel_a, panel_b, stride_b, Tile<acc_t>{tile_, width_}, prefetch, packed);
    for (int64_t r = 0; r < num_rows(i); ++r) {
      for (int64_t l = 0; l < num_columns; ++l) {
        const acc_t sum = tile_[r * width_ + l];
        out.c[r * out.ldc + l] = out.add == nullptr ? sum : out.add[r * out.ld_add + l] + sum;
      }
    }
  }

  const MicroKernels<acc_t>& kernels_ = kernels();
  const int64_t width_ = width();
  const int64_t numbers_ = numbers();
  const Source<a_t> a_;
  const Source<b_t> b_, next_;
  const Beside<b_t>& beside_;
  const int64_t first_row_;
  const int64_t m_, n_, k_;
  const int64_t num_panels_ = at::ceil_div(m_, kernels_.max_rows);
  const int64_t rows_each_ = m_ / num_panels_, num_longer_ = m_ % num_panels_;
  // Whether b can be read where it is. Where few rows of a meet it, it is read by rows, or by
  // columns.
  const bool readable_ = std::is_same_v<b_t, acc_t> && !kernels_.pairs && !b_.depth_contiguous &&
                         n_ % kernels_.lanes == 0;
  const bool transposable_ = std::is_same_v<a_t, acc_t> && std::is_same_v<b_t, acc_t> &&
                             !kernels_.pairs && a_.depth_contiguous && b_.depth_contiguous &&
                             n_ % kernels_.lanes == 0 && k_ % kernels_.lanes == 0;
  const bool few_ = m_ <= kMaxFewRows;
  const bool by_rows_ = readable_ && few_;
  const int64_t rows_ahead_ =
      at::round_up(at::ceil_div(kBytesAhead, bytes(std::min(n_, kMaxColumns))), kRowsAtATime);
  const int64_t depth_ = at::round_up(at::ceil_div(k_, num_squares()), kDepthStep);  // of a square
  c10::SmallVector<Square, kMaxSquares> squares_;
  bool last_ = false;  // of the depth
  acc_t* const tile_;  // sums apart, or a tile at the edge of c
  acc_t* const sums_;
  acc_t* const packed_b_;
  acc_t* const packed_a_;
  const Prefetch none_{reinterpret_cast<const char*>(packed_b_), 0, 0, 63, 0, 0};
};

}  // namespace

template <typename scalar_t>
int64_t gemm_space(int64_t largest) {
  return Product<scalar_t, scalar_t, scalar_t>::space(largest);
}

template <typename scalar_t, typename a_t, typename b_t, typename acc_t>
void gemm(int64_t m, int64_t n, int64_t k, Factor<a_t> a, Factor<b_t> b, Write write, acc_t* c,
          acc_t* space, const Beside<b_t>& beside) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (write != Write::kAdd) std::fill_n(c, m * n, acc_t(0));
    if (beside.finish) beside.finish({0, m, 0, n});
    return;
  }
  const auto columns = [](const Factor<b_t>& factor) {
    return Source<b_t>{factor.data, factor.width, factor.layout == Layout::kTransposed};
  };
  const Source<a_t> rows{a.data, a.width, a.layout == Layout::kPlain};
  const int64_t num_parts = at::ceil_div(m, kMaxRows);
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t first = part * m / num_parts, last = (part + 1) * m / num_parts;
    Product<scalar_t, a_t, b_t>({rows.at(first, 0), rows.stride, rows.depth_contiguous}, columns(b),
                                last - first, n, k, space, beside, columns(beside.next), first)
        .run(write, c + first * n);
  }
}

#define MOE_EXT_GEMM(scalar_t, a_t, b_t, acc_t)                                         \
  template void gemm<scalar_t, a_t, b_t, acc_t>(int64_t, int64_t, int64_t, Factor<a_t>, \
                                                Factor<b_t>, Write, acc_t*, acc_t*,     \
                                                const Beside<b_t>&);
MOE_EXT_GEMM(float, float, float, float)
MOE_EXT_GEMM(double, double, double, double)
#define MOE_EXT_GEMM_HALF(scalar_t)                 \
  MOE_EXT_GEMM(scalar_t, scalar_t, scalar_t, float) \
  MOE_EXT_GEMM(scalar_t, scalar_t, float, float)    \
  MOE_EXT_GEMM(scalar_t, float, scalar_t, float)
MOE_EXT_GEMM_HALF(c10::Half)
MOE_EXT_GEMM_HALF(c10::BFloat16)

template int64_t gemm_space<float>(int64_t);
template int64_t gemm_space<double>(int64_t);
template int64_t gemm_space<c10::Half>(int64_t);
template int64_t gemm_space<c10::BFloat16>(int64_t);

}  // namespace moe_ext::cpu
