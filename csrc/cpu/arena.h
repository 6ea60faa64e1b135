// The workspace of a thread: one piece of memory, divided in order into arrays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <utility>

#include "../math/integers.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace moe_ext::cpu {

// Arrays that start at cache lines. The code that takes the arrays runs twice: with an arena
// without memory, which counts the bytes, and with an arena of this size.
class Arena {
 public:
  Arena() = default;
  Arena(void* memory, int64_t size) : memory_(static_cast<std::byte*>(memory)), size_(size) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
#if defined(__SANITIZE_ADDRESS__)
  ~Arena() {
    if (memory_ != nullptr) __asan_unpoison_memory_region(memory_, used_);
  }
#endif

  // Returns an array of `size` elements of T; null without memory.
  template <typename T>
  T* take(int64_t size) {
    const int64_t bytes = size * static_cast<int64_t>(sizeof(T));
    const int64_t whole = round_up(bytes, kCacheLine) + kGap;
    std::byte* const array = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += whole;
    if (used_ > size_) throw std::logic_error("moe_ext: an arena is too small");
#if defined(__SANITIZE_ADDRESS__)
    if (array != nullptr) __asan_poison_memory_region(array + bytes, whole - bytes);
#endif
    return reinterpret_cast<T*>(array);
  }

  // The bytes of all arrays: whole cache lines.
  int64_t size() const { return used_; }

 private:
  static constexpr int64_t kCacheLine = 64;
  // AddressSanitizer reports an access between two arrays.
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int64_t kGap = kCacheLine;
#else
  static constexpr int64_t kGap = 0;
#endif

  std::byte* memory_ = nullptr;
  int64_t size_ = std::numeric_limits<int64_t>::max();
  int64_t used_ = 0;
};

}  // namespace moe_ext::cpu
