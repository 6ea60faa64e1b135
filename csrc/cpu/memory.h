// Memory of large tensors and of the kernels: page faults at the first write are most of the cost
// of fresh memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>

#include "../kernels/export.h"

namespace moe_ext::cpu {

// Huge pages. `freed` is the number of allocations when the block was freed.
struct MemoryBlock {
  void* data;
  size_t size;
  int64_t freed;
};

// Returns uninitialized memory, that of a freed block of about this size if there is one. The data
// is null if the memory is small, if the cache is disabled, or if there is no memory.
MOE_EXT_KERNEL_API MemoryBlock take_memory(size_t bytes);
MOE_EXT_KERNEL_API void give_memory(const MemoryBlock& block);

// Returns the cached memory to the operating system.
MOE_EXT_KERNEL_API void empty_cache();

// The bytes of freed memory that are cached, and the most that are. Throws std::invalid_argument if
// MOE_EXT_CACHE_BYTES is not a number.
MOE_EXT_KERNEL_API int64_t cached_bytes();
MOE_EXT_KERNEL_API int64_t cache_limit();

// An uninitialized array of numbers that starts at a cache line.
template <typename T>
class Array {
 public:
  Array() = default;
  explicit Array(int64_t size) : block_(take_memory(size * sizeof(T))) {
    if (block_.data == nullptr) {
      small_.reset(::operator new(size * sizeof(T), std::align_val_t(kCacheLine)));
    }
  }
  ~Array() {
    if (block_.data != nullptr) give_memory(block_);
  }
  Array(Array&& other) noexcept
      : block_(std::exchange(other.block_, {})), small_(std::move(other.small_)) {}
  Array& operator=(Array&& other) noexcept {
    std::swap(block_, other.block_);
    std::swap(small_, other.small_);
    return *this;
  }

  // Null for an array without memory.
  T* data() const { return static_cast<T*>(block_.data != nullptr ? block_.data : small_.get()); }

 private:
  static constexpr size_t kCacheLine = 64;
  struct Free {
    void operator()(void* data) const { ::operator delete(data, std::align_val_t(kCacheLine)); }
  };

  MemoryBlock block_ = {};
  std::unique_ptr<void, Free> small_;
};

}  // namespace moe_ext::cpu
