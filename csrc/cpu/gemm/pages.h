// Prefetches of pages.
#pragma once

#include <cstdint>

#include "../vectorize.h"

namespace moe_ext::cpu {

// Where lines are prefetched in steps of some bytes, in ascending order: prefetches a line far
// behind `next` if a page began in this step. It takes long to translate the address of a new page.
template <typename T>
MOE_EXT_KERNEL void prefetch_page(const T* next, int64_t step) {
  constexpr uintptr_t kPage = 4096;
  constexpr int64_t kBytesAhead = 32 << 10;
  if (reinterpret_cast<uintptr_t>(next) % kPage < static_cast<uintptr_t>(step)) {
    __builtin_prefetch(reinterpret_cast<const char*>(next) + kBytesAhead, /*rw=*/0, /*locality=*/2);
  }
}

}  // namespace moe_ext::cpu
