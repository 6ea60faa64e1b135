// A thread's workspace: one array, divided in order into arrays that are aligned to cache lines.
#pragma once

#include <ATen/ceil_div.h>

#include <cstdint>
#include <utility>

namespace moe_ext::cpu {

// Rounds `size` up so that the next array starts on a new cache line.
inline int64_t whole_lines(int64_t size) { return at::round_up<int64_t>(size, 16); }

// Returns the number of workspace elements that an array of `size` elements of T takes.
template <typename T, typename acc_t>
int64_t space_of(int64_t size) {
  static_assert(sizeof(acc_t) % sizeof(T) == 0);
  return whole_lines(at::ceil_div<int64_t>(size, sizeof(acc_t) / sizeof(T)));
}

// Takes an array of `size` elements of T from the front of the workspace.
template <typename T, typename acc_t>
T* take(acc_t*& workspace, int64_t size) {
  return reinterpret_cast<T*>(std::exchange(workspace, workspace + space_of<T, acc_t>(size)));
}

}  // namespace moe_ext::cpu
