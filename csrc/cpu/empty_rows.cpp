#include "empty_rows.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "../implement.h"

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
  TORCH_CHECK_VALUE(error == std::errc() && stop == end,
                    "MOE_EXT_CACHE_BYTES must be a number of bytes, got ", text);
  return bytes;
}

// Caches the memory of freed tensors. Every training step needs the same sizes; without the cache,
// the system would clear gigabytes of gradients, page by page, in every step.
class Cache {
 public:
  explicit Cache(size_t limit) : limit_(limit) {}

  struct Block {
    void* data;
    size_t size;
    int64_t freed;  // the allocation count when it was freed
  };

  // Returns a block of at least `size` bytes, a multiple of kHugePage; data is null if there is no
  // memory.
  Block take(size_t size) {
    {
      const std::lock_guard lock(mutex_);
      ++num_taken_;
      return_to_system([&](const Block& block) { return block.freed + kPatience < num_taken_; });
      const auto best = std::min_element(
          free_.begin(), free_.end(),
          [&](const Block& a, const Block& b) { return waste(a, size) < waste(b, size); });
      if (best != free_.end() && waste(*best, size) <= size / 4) {
        const Block block = *best;
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

  void give(Block block) {
    if (block.size > limit_) {
      munmap(block.data, block.size);
      return;
    }
    const std::lock_guard lock(mutex_);
    block.freed = num_taken_;
    free_.push_back(block);
    bytes_ += block.size;
    while (bytes_ > limit_) {
      const auto oldest =
          std::min_element(free_.begin(), free_.end(),
                           [](const Block& a, const Block& b) { return a.freed < b.freed; });
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
    return_to_system([](const Block&) { return true; });
  }

 private:
  // A block that stays unused for this many allocations is not needed by a repeating step.
  static constexpr int64_t kPatience = 4096;

  static void* map(size_t size) {
    return mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }

  static size_t waste(const Block& block, size_t size) {
    return block.size < size ? SIZE_MAX : block.size - size;
  }

  std::vector<Block>::iterator remove(std::vector<Block>::iterator block) {
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
  std::vector<Block> free_;
  size_t bytes_ = 0;  // of free_
  int64_t num_taken_ = 0;
};

Cache& cache() {
  // Never destroyed: static objects may own tensors.
  static auto* cache = new Cache(limit_of_environment());
  return *cache;
}

// The allocator of large tensors; their storages can be resized like any other.
struct LargeAllocator final : c10::Allocator {
  static constexpr size_t kSmallest = 2 * kHugePage;

  struct Allocation {
    Cache::Block block;
    int64_t used;
  };

  c10::DataPtr allocate(size_t size) override {
    if (size >= kSmallest) {
      const auto block = cache().take((size + kHugePage - 1) / kHugePage * kHugePage);
      if (block.data != nullptr) {
        auto* allocation = new Allocation{block, static_cast<int64_t>(size)};
        c10::reportMemoryUsageToProfiler(block.data, allocation->used, 0, 0, at::kCPU);
        return {block.data, allocation, &give_back, at::kCPU};
      }
    }
    return c10::GetCPUAllocator()->allocate(size);
  }

  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }

  static void give_back(void* context) {
    auto* allocation = static_cast<Allocation*>(context);
    c10::reportMemoryUsageToProfiler(allocation->block.data, -allocation->used, 0, 0, at::kCPU);
    cache().give(allocation->block);
    delete allocation;
  }
};

}  // namespace

at::Tensor empty_rows(at::IntArrayRef sizes, const at::TensorOptions& options) {
  size_t bytes = options.dtype().itemsize();
  for (const int64_t size : sizes) bytes *= size;
  static LargeAllocator large;
  c10::Allocator* allocator = &large;
  if (bytes < LargeAllocator::kSmallest || cache_limit() == 0) allocator = c10::GetCPUAllocator();
  return at::Tensor(at::detail::empty_generic(
      sizes, allocator, c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::typeMetaToScalarType(options.dtype()), /*memory_format_opt=*/std::nullopt));
}

void empty_cache() { cache().clear(); }
int64_t cached_bytes() { return static_cast<int64_t>(cache().bytes()); }
int64_t cache_limit() { return static_cast<int64_t>(cache().limit()); }

#else

at::Tensor empty_rows(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty(sizes, options);
}

void empty_cache() {}
int64_t cached_bytes() { return 0; }
int64_t cache_limit() { return 0; }

#endif

namespace {

at::Tensor empty_rows_like(const at::Tensor& x, c10::SymInt num_rows) {
  auto sizes = x.sym_sizes().vec();
  sizes.at(0) = std::move(num_rows);
  if (!x.is_cpu()) return x.new_empty_symint(sizes);
  return empty_rows(C10_AS_INTARRAYREF_SLOW(sizes), x.options());
}

}  // namespace

}  // namespace moe_ext::cpu

TORCH_LIBRARY_IMPL(moe_ext, CompositeExplicitAutograd, m) {
  moe_ext::implement<"_empty_rows", &moe_ext::cpu::empty_rows_like>(m);
}
