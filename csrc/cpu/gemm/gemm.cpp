#include "gemm.h"

#include <algorithm>
#include <type_traits>

#include "../../kernels/types.h"
#include "../../math/integers.h"
#include "../elementwise.h"
#include "../vectorize.h"
#include "product.h"
#include "traversals.h"

namespace moe_ext::cpu {
namespace {

// Selects the traversal of a GEMM and runs it.
template <typename Product, typename acc_t>
void multiply(Product& product, Write write, acc_t* c) {
  if constexpr (std::is_same_v<acc_t, float>) {
    if (FewRowsOfCodes<Product>::applies(product)) return FewRowsOfCodes(product).run(write, c);
  }
  if (Axpyf<Product>::applies(product)) return Axpyf(product).run(write, c);
  if (Dotxf<Product>::applies(product)) return Dotxf(product).run(write, c);
  if (FewRowsWidened<Product>::applies(product)) return FewRowsWidened(product).run(write, c);
  // C is large and not read again soon, such as a weight gradient, so it should not evict A and B.
  if (write == Write::kStream && WriteOnce<Product, acc_t>::applies(product)) {
    return WriteOnce<Product, acc_t>(product).run(/*non_temporal=*/true, c);
  }
  // The general case; it reaches the full rate of the processor if m is large.
  Gebp(product).run(write, c);
}

}  // namespace

template <typename scalar_t>
GemmWorkspace<scalar_t>::GemmWorkspace(Arena& arena, std::initializer_list<GemmSize> sizes) {
  const auto& kernels = micro_kernels<scalar_t, acc_t>();
  const int64_t nr = kernels.nr();
  int64_t rows_size = 0, packed_b_size = 0, few_rows_size = 0, packed_a_size = 0, apart_size = 0;
  for (const auto& [m, n, k] : sizes) {
    const int64_t num_groups = kernels.num_groups(k);
    rows_size = std::max(rows_size, round_up(std::min(n, kMaxColumns), nr));
    packed_b_size = std::max(packed_b_size, std::min(kKC<acc_t>, num_groups) * nr);
    if (!std::is_same_v<scalar_t, acc_t>) {
      few_rows_size = std::max(few_rows_size, round_up(k, kKCMultiple));
    }
    const int64_t num_panels = ceil_div(std::min(m, kMC), kernels.max_rows);
    int64_t most_groups = kMaxKBlocks * kKC<acc_t>;
    if (kernels.sums_apart) {
      most_groups = kernels.num_groups(kMaxDepthApart);
      apart_size = std::max(apart_size, std::min(m, kMC) * ld_apart(n));
    }
    packed_a_size = std::max(
        packed_a_size, num_panels * kernels.a_panel_width * std::min(most_groups, num_groups));
  }
  if (kernels.rounds) {
    const int64_t size_of_b = kBytesOfB / static_cast<int64_t>(sizeof(acc_t));
    packed_b_size = std::max(packed_b_size, size_of_b);
  }
  tile = arena.take<acc_t>(kernels.max_rows * nr);
  rows = arena.take<acc_t>(kMaxFewRows * rows_size);
  packed_b = arena.take<acc_t>(packed_b_size);
  few_rows_a = arena.take<acc_t>(kMaxFewRows * few_rows_size);
  packed_a = arena.take<acc_t>(packed_a_size);
  apart = arena.take<acc_t>(apart_size);
}

template <typename scalar_t>
int64_t rounded_sums_size(int64_t m, int64_t n) {
  if (std::is_same_v<scalar_t, acc_type<scalar_t>>) return 0;
  return std::min(m, kMC) * std::min(n, kMaxColumns);
}

namespace {

// Calls body(product, first_row) for every M-block.
template <typename scalar_t, typename a_t, typename b_t, typename Body>
void for_m_blocks(int64_t m, int64_t n, int64_t k, Operand<a_t> a, Operand<b_t> b,
                  const GemmWorkspace<scalar_t>& workspace, const Epilogue<b_t>& epilogue,
                  const Body& body) {
  const View<a_t> rows = view_of_a(a);
  const int64_t num_blocks = ceil_div(m, kMC);
  for (int64_t block = 0; block < num_blocks; ++block) {
    const auto [first, last] = part_of(m, block, num_blocks);
    const View<a_t> a_block{
        .data = rows.at(first, 0), .ld = rows.ld, .k_contiguous = rows.k_contiguous};
    Product<scalar_t, a_t, b_t> product(a_block, view_of_b(b), last - first, n, k, workspace,
                                        epilogue, first);
    if (product.kernels.begin != nullptr) product.kernels.begin();
    body(product, first);
    if (product.kernels.end != nullptr) product.kernels.end();
  }
}

}  // namespace

template <typename scalar_t, typename a_t, typename b_t, typename acc_t>
void gemm(int64_t m, int64_t n, int64_t k, Operand<a_t> a, Operand<b_t> b, Write write, acc_t* c,
          const GemmWorkspace<scalar_t>& workspace, const Epilogue<b_t>& epilogue) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (write != Write::kAdd) std::fill_n(c, m * n, acc_t(0));
    if (epilogue.run) epilogue.run({.row = 0, .num_rows = m, .column = 0, .num_columns = n}, c, n);
    return;
  }
  for_m_blocks<scalar_t>(m, n, k, a, b, workspace, epilogue, [&](auto& product, int64_t first) {
    multiply(product, write, c + first * n);
  });
}

template <typename scalar_t, typename a_t, typename b_t, typename acc_t>
void gemm_rounded(int64_t m, int64_t n, int64_t k, Operand<a_t> a, Operand<b_t> b, Write write,
                  scalar_t* c, acc_t* sums, const GemmWorkspace<scalar_t>& workspace) {
  if constexpr (std::is_same_v<scalar_t, acc_t>) {
    gemm<scalar_t>(m, n, k, a, b, write, c, workspace);
  } else if (m == 0 || n == 0 || k == 0) {
    std::fill_n(c, m * n, scalar_t(0));
  } else {
    for_m_blocks<scalar_t>(m, n, k, a, b, workspace, {}, [&](auto& product, int64_t first) {
      using Product = std::remove_reference_t<decltype(product)>;
      if constexpr (std::is_same_v<scalar_t, c10::BFloat16>) {
        if (WriteOnce<Product, scalar_t>::applies(product)) {
          WriteOnce<Product, scalar_t>(product).run(write == Write::kStream, c + first * n);
          return;
        }
      }
      for (int64_t j = 0; j < n; j += kMaxColumns) {
        const View<b_t> columns{
            .data = product.b.at(j, 0), .ld = product.b.ld, .k_contiguous = product.b.k_contiguous};
        Product part(product.a, columns, product.m, std::min(n - j, kMaxColumns), k, workspace,
                     product.epilogue, first);
        multiply(part, Write::kReplace, sums);
        for (int64_t r = 0; r < part.m; ++r) {
          vectorized<Convert>(static_cast<const acc_t*>(sums + r * part.n), part.n,
                              c + (first + r) * n + j);
        }
      }
    });
  }
}

#define MOE_EXT_GEMM(scalar_t, a_t, b_t, acc_t)                             \
  template void gemm<scalar_t, a_t, b_t, acc_t>(                            \
      int64_t, int64_t, int64_t, Operand<a_t>, Operand<b_t>, Write, acc_t*, \
      const GemmWorkspace<scalar_t>&, const Epilogue<b_t>&);
#define MOE_EXT_GEMM_ROUNDED(scalar_t, a_t, b_t, acc_t)                                          \
  template void gemm_rounded<scalar_t, a_t, b_t, acc_t>(int64_t, int64_t, int64_t, Operand<a_t>, \
                                                        Operand<b_t>, Write, scalar_t*, acc_t*,  \
                                                        const GemmWorkspace<scalar_t>&);
#define MOE_EXT_GEMM_HALF(scalar_t)                      \
  MOE_EXT_GEMM(scalar_t, scalar_t, scalar_t, float)      \
  MOE_EXT_GEMM(scalar_t, scalar_t, float, float)         \
  MOE_EXT_GEMM(scalar_t, float, scalar_t, float)         \
  MOE_EXT_GEMM_ROUNDED(scalar_t, float, scalar_t, float) \
  MOE_EXT_GEMM_ROUNDED(scalar_t, scalar_t, float, float)
MOE_EXT_GEMM(float, float, float, float)
MOE_EXT_GEMM(double, double, double, double)
MOE_EXT_GEMM_ROUNDED(float, float, float, float)
MOE_EXT_GEMM_ROUNDED(double, double, double, double)
MOE_EXT_GEMM_HALF(c10::Half)
MOE_EXT_GEMM_HALF(c10::BFloat16)

template int64_t rounded_sums_size<float>(int64_t, int64_t);
template int64_t rounded_sums_size<double>(int64_t, int64_t);
template int64_t rounded_sums_size<c10::Half>(int64_t, int64_t);
template int64_t rounded_sums_size<c10::BFloat16>(int64_t, int64_t);

template struct GemmWorkspace<float>;
template struct GemmWorkspace<double>;
template struct GemmWorkspace<c10::Half>;
template struct GemmWorkspace<c10::BFloat16>;

}  // namespace moe_ext::cpu
