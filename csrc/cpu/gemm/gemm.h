// Matrix products on one thread, with kernels of our own.
#pragma once

#include <ATen/OpMathType.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>

#include "../region.h"

namespace moe_ext::cpu {

enum class Layout { kPlain, kTransposed };

// A matrix product's factor: contiguous rows of a width, read as they are or transposed.
template <typename T>
struct Factor {
  const T* data;
  int64_t width;
  Layout layout = Layout::kPlain;
};

template <typename T>
Factor<T> plain(const T* data, int64_t width) {
  return {data, width};
}

template <typename T>
Factor<T> transposed(const T* data, int64_t width) {
  return {data, width, Layout::kTransposed};
}

// What is done beside a product.
template <typename b_t>
struct Beside {
  using Body = c10::function_ref<void(const Region&)>;
  // Called once with every element of c when it is final, while the first cache level has it if
  // that pays; may change it. The columns of a row come in ascending order.
  Body finish = nullptr;
  // Hints. Called some time before `finish`, to fetch what it needs; and what b is in the next
  // product, to be fetched toward the end of this one.
  Body prepare = nullptr;
  Factor<b_t> next = {nullptr, 0};
};

// How a product is written; kStream is kReplace past the caches where that is possible.
enum class Write { kReplace, kAdd, kStream };

// How many numbers of a workspace gemm needs when m, n and k are at most `largest`.
template <typename scalar_t>
int64_t gemm_space(int64_t largest);

// c = a b, as `write` says, all by rows: a [m, k], b [k, n], c [m, n]; a transposed factor is
// stored as [k, m] or [n, k]. An element of c depends on its row of a and its column of b alone, to
// the last bit, whatever m and n are. `space` has gemm_space numbers, aligned to 64 bytes.
template <typename scalar_t, typename a_t, typename b_t, typename acc_t>
void gemm(int64_t m, int64_t n, int64_t k, Factor<a_t> a, Factor<b_t> b, Write write, acc_t* c,
          acc_t* space, const Beside<b_t>& beside = {});

}  // namespace moe_ext::cpu
