#include "memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

namespace moe_ext::cpu {

#if defined(__linux__)
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// Returns the most bytes that are cached.
size_t limit_of_environment() {
  const char* const text = std::getenv("MOE_EXT_CACHE_BYTES");
  if (text == nullptr) {
    return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE) / 4;
  }
  size_t bytes = 0;
  const char* const end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, bytes);
  if (error != std::errc() || stop != end) {
    throw std::invalid_argument(std::string("MOE_EXT_CACHE_BYTES must be a number of bytes, got ") +
                                text);
  }
  return bytes;
}

// Caches the memory of freed tensors. Every training step needs the same sizes; without the cache,
// the system would clear gigabytes of gradients, page by page, in every step.
class Cache {
 public:
  explicit Cache(size_t limit) : limit_(limit) {}

  // Returns a block of `size` bytes or more, a multiple of kHugePage; data is null if there is no
  // memory.
  MemoryBlock take(size_t size) {
    {
      const std::lock_guard lock(mutex_);
      ++num_taken_;
      return_to_system(
          [&](const MemoryBlock& block) { return block.freed + kPatience < num_taken_; });
      const auto best = std::min_element(free_.begin(), free_.end(),
                                         [&](const MemoryBlock& a, const MemoryBlock& b) {
                                           return waste(a, size) < waste(b, size);
                                         });
      if (best != free_.end() && waste(*best, size) <= size / 4) {
        const MemoryBlock block = *best;
        remove(best);
        return block;
      }
    }
    // Aligns the block to huge pages by unmapping the memory before and after it.
    void* start = map(size + kHugePage);
    if (start == MAP_FAILED) {
      clear();
      start = map(size + kHugePage);
    }
    if (start == MAP_FAILED) return {nullptr, 0, 0};
    auto* begin = static_cast<char*>(start);
    auto* data = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + kHugePage - 1) /
                                         kHugePage * kHugePage);
    if (data > begin) munmap(begin, data - begin);
    munmap(data + size, kHugePage - (data - begin));
    // This is a hint: if the system ignores it, the pages are small.
    madvise(data, size, MADV_HUGEPAGE);
    return {data, size, 0};
  }

  void give(MemoryBlock block) {
    if (block.size > limit_) {
      munmap(block.data, block.size);
      return;
    }
    const std::lock_guard lock(mutex_);
    block.freed = num_taken_;
    free_.push_back(block);
    bytes_ += block.size;
    while (bytes_ > limit_) {
      const auto oldest = std::min_element(
          free_.begin(), free_.end(),
          [](const MemoryBlock& a, const MemoryBlock& b) { return a.freed < b.freed; });
      munmap(oldest->data, oldest->size);
      remove(oldest);
    }
  }

  size_t limit() const { return limit_; }

  size_t bytes() {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }

  void clear() {
    const std::lock_guard lock(mutex_);
    return_to_system([](const MemoryBlock&) { return true; });
  }

 private:
  // A block that stays unused for this many allocations is not needed by a repeating step.
  static constexpr int64_t kPatience = 4096;

  static void* map(size_t size) {
    return mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }

  static size_t waste(const MemoryBlock& block, size_t size) {
    return block.size < size ? SIZE_MAX : block.size - size;
  }

  std::vector<MemoryBlock>::iterator remove(std::vector<MemoryBlock>::iterator block) {
    bytes_ -= block->size;
    return free_.erase(block);
  }

  template <typename Condition>
  void return_to_system(const Condition& condition) {
    for (auto block = free_.begin(); block != free_.end();) {
      if (!condition(*block)) {
        ++block;
        continue;
      }
      munmap(block->data, block->size);
      block = remove(block);
    }
  }

  const size_t limit_;
  std::mutex mutex_;
  std::vector<MemoryBlock> free_;
  size_t bytes_ = 0;  // of free_
  int64_t num_taken_ = 0;
};

Cache& cache() {
  // Never destroyed: static objects may own tensors.
  static auto* cache = new Cache(limit_of_environment());
  return *cache;
}

}  // namespace

MemoryBlock take_memory(size_t bytes) {
  constexpr size_t kSmallest = 2 * kHugePage;
  if (bytes < kSmallest || cache_limit() == 0) return {};
  return cache().take((bytes + kHugePage - 1) / kHugePage * kHugePage);
}

void give_memory(const MemoryBlock& block) { cache().give(block); }
void empty_cache() { cache().clear(); }
int64_t cached_bytes() { return static_cast<int64_t>(cache().bytes()); }
int64_t cache_limit() { return static_cast<int64_t>(cache().limit()); }

#else

MemoryBlock take_memory(size_t) { return {}; }
void give_memory(const MemoryBlock&) {}
void empty_cache() {}
int64_t cached_bytes() { return 0; }
int64_t cache_limit() { return 0; }

#endif

namespace {

constexpr std::align_val_t kCacheLine{64};
ReportMemory report_memory = [](void*, int64_t) {};

}  // namespace

void set_memory_report(ReportMemory report) { report_memory = report; }

void FreeArray::operator()(void* data) const {
  report_memory(data, -bytes);
  if (block.data != nullptr) {
    give_memory(block);
  } else {
    ::operator delete(data, kCacheLine);
  }
}

std::unique_ptr<void, FreeArray> allocate(int64_t bytes) {
  const MemoryBlock block = take_memory(bytes);
  void* const data = block.data != nullptr ? block.data : ::operator new(bytes, kCacheLine);
  report_memory(data, bytes);
  return {data, FreeArray{.block = block, .bytes = bytes}};
}

}  // namespace moe_ext::cpu
