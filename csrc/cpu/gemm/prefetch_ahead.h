// Prefetches the bytes behind those that a loop reads. The source file includes this header after
// it has defined MOE_EXT_TARGET.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../vectorize.h"
#include "simd.h"

namespace moe_ext::cpu {
namespace {

// The first line of a page is prefetched this far ahead, because it takes long to translate the
// address of a new page.
constexpr int64_t kPageBytes = 4096;
constexpr int64_t kPagesAhead = 32 << 10;

// Prefetches what follows a panel while the panel is read. The addresses ascend by lines, whatever
// the order in which a panel is read: memory delivers that faster.
class Ahead {
 public:
  // Prefetches nothing.
  Ahead() : next_(nullptr), due_(nullptr), end_(nullptr), step_(0) {}

  // What is prefetched is some bytes behind the panel that is read, up to `end`, that of all
  // panels, and after it `later` if that is not null; prefetch() is called num_steps times.
  Ahead(const uint8_t* panel, const uint8_t* end, int64_t panel_bytes, int64_t num_steps,
        int64_t bytes_ahead, const uint8_t* later = nullptr)
      : next_(panel + panel_bytes + bytes_ahead),
        due_(next_),
        end_(end),
        step_((panel_bytes + num_steps - 1) / num_steps) {
    if (next_ < end_) return;
    next_ = due_ = later == nullptr ? end_ : later;
    end_ = next_ + (later == nullptr ? 0 : panel_bytes);
  }

  // Prefetches a step, each line once: for loops that wait for the memory, where a second prefetch
  // of a line would take as long as the first.
  MOE_EXT_MEMBER void prefetch() {
    const uint8_t* before = next_;
    due_ = std::min(due_ + step_, end_);
    for (; next_ < due_; next_ += 64) __builtin_prefetch(next_);
    prefetch_page(before);
  }

  // Prefetches a step of at most 64 (kLines - 1) bytes, for loops that do not: without a branch,
  // but a line of two steps twice.
  template <int kLines>
  MOE_EXT_MEMBER void prefetch_lines() {
    const uint8_t* before = next_;
    MOE_EXT_UNROLL for (int line = 0; line < kLines; ++line) {
      __builtin_prefetch(next_ + 64 * line);
    }
    next_ = std::min(next_ + step_, end_);
    prefetch_page(before);
  }

 private:
  static uintptr_t page(const uint8_t* byte) {
    return reinterpret_cast<uintptr_t>(byte) / kPageBytes;
  }

  MOE_EXT_MEMBER void prefetch_page(const uint8_t* before) {
    if (page(next_) != page(before)) {
      __builtin_prefetch(next_ + kPagesAhead, /*rw=*/0, /*locality=*/2);
    }
  }

  const uint8_t *next_, *due_, *end_;
  int64_t step_;
};

}  // namespace
}  // namespace moe_ext::cpu
