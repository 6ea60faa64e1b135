#include "gemm.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <type_traits>

#include "elementwise.h"
#include "micro_kernels.h"
#include "pack.h"
#include "vectorize.h"

namespace moe_ext::cpu {
namespace {

// The products are blocked by kSquare words of depth. A panel of B, packed, stays in the first
// cache level while it meets the panels of A, of kMaxRows rows; those stay in the second. Few
// panels of A are not worth packing B.
template <typename acc_t>
constexpr int64_t kSquare = 1024 / sizeof(acc_t);
constexpr int64_t kMaxRows = 512;

// So deep are the blocks where B is read by rows, and so many columns of C are computed at a time
// there.
constexpr int64_t kShallow = 16;
constexpr int64_t kMaxColumns = 2048;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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
    if (pairs) return arguments([](auto... all) { run_avx512<PackPanel<Pairs<64>>>(all...); });
  }
  if (isa() >= Isa::kAvx512) {
    return arguments([](auto... all) { run_avx512<PackPanel<Words<64, acc_t>>>(all...); });
  }
  if (isa() == Isa::kAvx2) {
    return arguments([](auto... all) { run_avx2<PackPanel<Words<32, acc_t>>>(all...); });
  }
#endif
  arguments([](auto... all) { PackPanel<Words<16, acc_t>>::run(all...); });
}

// The product for at most kMaxRows rows.
template <typename scalar_t, typename a_t, typename b_t>
class Product {
 public:
  using acc_t = at::opmath_type<scalar_t>;

  Product(Source<a_t> a, Source<b_t> b, int64_t m, int64_t n, int64_t k, acc_t* space)
      : a_(a),
        b_(b),
        m_(m),
        n_(n),
        k_(k),
        edge_(space),
        sums_(edge_ + edge_size()),
        packed_b_(sums_ + sums_size(n)),
        packed_a_(packed_b_ + panel_size(k)) {}

  // For a product whose m, n and k are at most `largest`.
  static int64_t space(int64_t largest) {
    return edge_size() + sums_size(largest) + panel_size(largest) + panels_size(largest, largest);
  }

  void run(Write write, acc_t* c) {
    // Sums that go on later must stay in the caches.
    const bool once = k_ <= (by_rows_ ? kShallow : depth_);
    const Write start = once || write != Write::kStream ? write : Write::kReplace;
    if (kernels_.start != nullptr) kernels_.start();
    for (int64_t p = 0; p < k_; p += depth_) {
      const int64_t depth = std::min(k_ - p, depth_);
      num_words_ = words(depth);
      for (int64_t i = 0; i < num_panels_; ++i) {
        const int64_t num_rows = std::min(m_ - first(i), kernels_.panel_stride);
        pack_panel(kernels_.pairs, a_, first(i), p, num_rows, depth, num_words_,
                   kernels_.panel_stride, kernels_.a_by_rows, panel_a(i));
      }
      const Write how = p == 0 ? start : Write::kAdd;
      if (by_rows_) {
        rows_of_b(p, depth, how, c);
      } else {
        for (int64_t j = 0; j < n_; j += width_) panel_of_b(p, j, depth, how, c + j);
      }
    }
    if (kernels_.stop != nullptr) kernels_.stop();
#if defined(__x86_64__)
    if (start == Write::kStream) __builtin_ia32_sfence();
#endif
  }

 private:
  static constexpr int64_t kSize = kSquare<acc_t>;

  static const MicroKernels<acc_t>& kernels() { return micro_kernels<scalar_t, acc_t>(); }
  static int64_t width() { return kMaxTileVectors * kernels().lanes; }
  static int64_t numbers() { return kernels().pairs ? 2 : 1; }  // in a word
  static int64_t words(int64_t depth) {
    return ceil_div(ceil_div(depth, numbers()), kernels().depth) * kernels().depth;
  }

  static int64_t edge_size() { return kernels().rows * width(); }
  static int64_t sums_size(int64_t n) {
    return 2 * kernels().rows * ceil_div(std::min(n, kMaxColumns), width()) * width();
  }
  static int64_t panel_size(int64_t k) { return std::min(kSize, words(k)) * width(); }
  static int64_t panels_size(int64_t m, int64_t k) {
    return ceil_div(std::min(m, kMaxRows), kernels().rows) * kernels().panel_stride *
           std::min(kSize, words(k));
  }

  // The first row of a panel of a: those with a row more than the others come first.
  int64_t first(int64_t panel) const { return panel * rows_each_ + std::min(panel, num_longer_); }
  acc_t* panel_a(int64_t i) const { return packed_a_ + i * num_words_ * kernels_.panel_stride; }

  // All of c by the panel of b at (p, j).
  void panel_of_b(int64_t p, int64_t j, int64_t depth, Write write, acc_t* c) {
    const int64_t num_columns = std::min(n_ - j, width_);
    const acc_t* panel = packed_b_;
    int64_t stride = width_;
    if constexpr (std::is_same_v<b_t, acc_t>) {
      if (in_place_) panel = b_.at(j, p), stride = b_.stride;
    }
    if (!in_place_) {
      pack_panel(kernels_.pairs, b_, j, p, num_columns, depth, num_words_, width_,
                 /*by_columns=*/false, packed_b_);
    }
    Prefetch next = prefetch(p, j);
    for (int64_t i = 0; i < num_panels_; ++i, next.first += num_words_ >> next.slowness) {
      tile(i, 0, num_words_, panel, stride, num_columns, write, c, n_,
           i < 1 << next.slowness ? next : none_);
    }
  }

  // All of c by rows of b, read where they are, one after the other. What is added to c is summed
  // apart, as it is in a square.
  void rows_of_b(int64_t p, int64_t depth, Write write, acc_t* c) {
    if constexpr (std::is_same_v<b_t, acc_t>) {
      const bool shallow = depth <= kShallow, apart = !shallow && write == Write::kAdd;
      for (int64_t j = 0; j < n_; j += kMaxColumns) {
        const int64_t num_columns = std::min(n_ - j, kMaxColumns);
        acc_t* sums = apart ? sums_ : c + j;
        const int64_t stride = apart ? num_columns : n_;
        for (int64_t q = 0; q < depth; q += kShallow) {
          const int64_t num_words = std::min(depth - q, kShallow);
          const Write how = q > 0 ? Write::kContinue : shallow ? write : Write::kReplace;
          for (int64_t jj = 0; jj < num_columns; jj += width_) {
            const Prefetch next{reinterpret_cast<const char*>(b_.at(j + jj, p + q + kShallow)),
                                stride_,
                                kShallow - 1,
                                __builtin_ctzll(kShallow),
                                0,
                                0};
            for (int64_t i = 0; i < num_panels_; ++i) {
              tile(i, q, num_words, b_.at(j + jj, p + q), b_.stride,
                   std::min(num_columns - jj, width_), how, sums + jj, stride,
                   i == 0 && p + q + kShallow < k_ ? next : none_);
            }
          }
        }
        for (int64_t r = 0; apart && r < m_; ++r) {
          vectorized<Add>(static_cast<const acc_t*>(sums + r * stride), num_columns,
                          c + r * n_ + j);
        }
      }
    }
  }

  // What is fetched while the panel of b at (p, j) is in use, in the tiles of the first panels of
  // a: of the square after this one as many rows as there are panels of b in a square; or a panel,
  // if b is transposed.
  Prefetch prefetch(int64_t p, int64_t j) const {
    const int64_t ahead = b_.depth_contiguous ? width_ : kSize;
    int64_t next_p = p, next_j = j / ahead * ahead + ahead;
    if (next_j >= n_) next_p += depth_, next_j = 0;
    if (next_p >= k_) return none_;
    const int64_t num_rows = b_.depth_contiguous ? width_ : width_ * numbers_;
    const b_t* data = b_.at(next_j, next_p + (b_.depth_contiguous ? 0 : j % ahead * numbers_));
    const int slowness = num_panels_ >= 8 ? 3 : num_panels_ >= 4 ? 2 : num_panels_ >= 2 ? 1 : 0;
    return {reinterpret_cast<const char*>(data), stride_,  num_rows - 1,
            __builtin_ctzll(num_rows),           slowness, 0};
  }

  // The rows of panel i of a, from word q on, times a panel of b; c is the first row's.
  void tile(int64_t i, int64_t q, int64_t num_words, const acc_t* panel_b, int64_t stride_b,
            int64_t num_columns, Write write, acc_t* c, int64_t stride_c,
            const Prefetch& prefetch) {
    const int64_t num_rows = first(i + 1) - first(i);
    const int64_t vectors = ceil_div(num_columns, kernels_.lanes);
    const auto multiply = kernels_.tile[vectors - 1][num_rows - 1];
    const acc_t* panel = panel_a(i) + q * kernels_.panel_stride;
    c += first(i) * stride_c;
    if (num_columns == vectors * kernels_.lanes) {
      return multiply(num_words, panel, panel_b, stride_b, c, stride_c, write, prefetch);
    }
    multiply(num_words, panel, panel_b, stride_b, edge_, width_, Write::kReplace, prefetch);
    for (int64_t r = 0; r < num_rows; ++r) {
      for (int64_t l = 0; l < num_columns; ++l) {
        acc_t& out = c[r * stride_c + l];
        out = write == Write::kAdd ? out + edge_[r * width_ + l] : edge_[r * width_ + l];
      }
    }
  }

  const MicroKernels<acc_t>& kernels_ = kernels();
  const int64_t width_ = width();
  const int64_t numbers_ = numbers();
  const Source<a_t> a_;
  const Source<b_t> b_;
  const int64_t m_, n_, k_;
  const int64_t stride_ = b_.stride * static_cast<int64_t>(sizeof(b_t));  // bytes
  const int64_t num_panels_ = ceil_div(m_, kernels_.rows);
  const int64_t rows_each_ = m_ / num_panels_, num_longer_ = m_ % num_panels_;
  // Where few panels of a meet it, b is read where it is; where very few do, it is read by rows.
  const bool in_place_ = std::is_same_v<b_t, acc_t> && !kernels_.pairs && !b_.depth_contiguous &&
                         num_panels_ <= 8 && n_ % kernels_.lanes == 0;
  const bool by_rows_ = in_place_ && num_panels_ <= 2;
  const int64_t depth_ = kSize * numbers_;  // of a square
  int64_t num_words_ = 0;
  acc_t* const edge_;
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
          acc_t* space) {
  if (k == 0 && write != Write::kAdd) std::fill_n(c, m * n, acc_t(0));
  if (m == 0 || n == 0 || k == 0) return;
  const bool plain_a = a.layout == Layout::kPlain, plain_b = b.layout == Layout::kPlain;
  const Source<a_t> rows{a.data, plain_a ? k : m, plain_a};
  const Source<b_t> columns{b.data, plain_b ? n : k, !plain_b};
  const int64_t num_parts = ceil_div(m, kMaxRows);
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t first = part * m / num_parts, last = (part + 1) * m / num_parts;
    Product<scalar_t, a_t, b_t>({rows.at(first, 0), rows.stride, rows.depth_contiguous}, columns,
                                last - first, n, k, space)
        .run(write, c + first * n);
  }
}

#define MOE_EXT_GEMM(scalar_t, a_t, b_t, acc_t)                                         \
  template void gemm<scalar_t, a_t, b_t, acc_t>(int64_t, int64_t, int64_t, Factor<a_t>, \
                                                Factor<b_t>, Write, acc_t*, acc_t*);
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
