// A thread's workspace: one array, from which arrays that start on a cache line are taken in order.
#pragma once

#include <ATen/ceil_div.h>

#include <cstdint>
#include <utility>

namespace moe_ext::cpu {

// `size` numbers, rounded up so that the array after them starts on a cache line of its own.
inline int64_t whole_lines(int64_t size) { return at::round_up<int64_t>(size, 16); }

// Takes an array of `size` numbers of T from the front of the workspace.
template <typename T, typename acc_t>
T* take(acc_t*& workspace, int64_t size) {
  static_assert(sizeof(T) <= sizeof(acc_t));
  return reinterpret_cast<T*>(std::exchange(workspace, workspace + whole_lines(size)));
}

}  // namespace moe_ext::cpu
