// Matrix products on one thread, with kernels of our own.
#pragma once

#include <ATen/OpMathType.h>

#include <cstdint>

#include "micro_kernels.h"

namespace moe_ext::cpu {

enum class Layout { kPlain, kTransposed };

// A matrix product's factor: contiguous rows, read as they are or transposed.
template <typename T>
struct Factor {
  explicit Factor(const T* data, Layout layout = Layout::kPlain) : data(data), layout(layout) {}
  const T* data;
  Layout layout;
};

template <typename T>
Factor<T> transposed(const T* data) {
  return Factor<T>(data, Layout::kTransposed);
}

// How many numbers of a workspace gemm needs when m, n and k are at most `largest`.
template <typename scalar_t>
int64_t gemm_space(int64_t largest);

// c = a b, as `write` says, all by rows: a [m, k], b [k, n], c [m, n]; a transposed factor is
// stored as [k, m] or [n, k]. An element of c depends on its row of a and its column of b alone, to
// the last bit, whatever m and n are. `space` has gemm_space numbers, aligned to 64 bytes.
template <typename scalar_t, typename a_t, typename b_t, typename acc_t>
void gemm(int64_t m, int64_t n, int64_t k, Factor<a_t> a, Factor<b_t> b, Write write, acc_t* c,
          acc_t* space);

}  // namespace moe_ext::cpu
