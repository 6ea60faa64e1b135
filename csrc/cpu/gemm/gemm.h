// General matrix multiplication (GEMM) on one thread, with an epilogue.
#pragma once

#include <ATen/OpMathType.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>

#include "../region.h"

namespace moe_ext::cpu {

// A matrix by rows, which are `ld` numbers apart (the leading dimension), read as it is or
// transposed.
template <typename T>
struct Operand {
  const T* data;
  int64_t ld;
  bool transposed = false;
};

template <typename T>
Operand<T> plain(const T* data, int64_t ld) {
  return {.data = data, .ld = ld};
}

template <typename T>
Operand<T> transposed(const T* data, int64_t ld) {
  return {.data = data, .ld = ld, .transposed = true};
}

// What follows a product.
template <typename b_t>
struct Epilogue {
  using Body = c10::function_ref<void(const Region&)>;
  // Called once with every element of C when it is final, while the first cache level has it if
  // that pays; may change it. The columns of a row come in ascending order.
  Body run = nullptr;
  // Two hints. `prefetch` is called some time before `run` to prefetch what it reads; next_b is the
  // B of the next product, which is prefetched toward the end of this one.
  Body prefetch = nullptr;
  Operand<b_t> next_b = {.data = nullptr, .ld = 0};
};

// How C is written. kStream is kReplace with non-temporal stores, past the caches, if possible.
enum class Write { kReplace, kAdd, kStream };

// How many numbers of a workspace gemm needs if m, n and k are at most `largest`.
template <typename scalar_t>
int64_t gemm_workspace_size(int64_t largest);

// C = A B, or C += A B, where A is [m, k], B is [k, n] and C is [m, n], contiguous. An element of C
// depends only on its row of A and its column of B, bitwise, whatever m and n are. `workspace` has
// gemm_workspace_size numbers, aligned to 64 bytes.
template <typename scalar_t, typename a_t, typename b_t, typename acc_t>
void gemm(int64_t m, int64_t n, int64_t k, Operand<a_t> a, Operand<b_t> b, Write write, acc_t* c,
          acc_t* workspace, const Epilogue<b_t>& epilogue = {});

}  // namespace moe_ext::cpu
