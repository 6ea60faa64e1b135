// Memory of large tensors and of the kernels: page faults at the first write are most of the cost
// of fresh memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

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

// Sets what is told of the memory that arrays take (bytes > 0) and free (bytes < 0), such as
// torch's profiler.
using ReportMemory = void (*)(void* data, int64_t bytes);
MOE_EXT_KERNEL_API void set_memory_report(ReportMemory report);

// The memory of an array.
struct FreeArray {
  MemoryBlock block = {};  // data is null: small memory
  int64_t bytes = 0;

  void operator()(void* data) const;
};
std::unique_ptr<void, FreeArray> allocate(int64_t bytes);

// An uninitialized array of numbers that starts at a cache line.
template <typename T>
class Array {
 public:
  Array() = default;
  explicit Array(int64_t size) : memory_(allocate(size * static_cast<int64_t>(sizeof(T)))) {}

  // Null for an array without memory.
  T* data() const { return static_cast<T*>(memory_.get()); }

 private:
  std::unique_ptr<void, FreeArray> memory_;
};

}  // namespace moe_ext::cpu
