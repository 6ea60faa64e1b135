#include "empty_rows.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <utility>

#include "cpu/memory.h"
#include "implement.h"

namespace moe_ext {
namespace {

// The allocator of large tensors; their storages can be resized like any other.
struct LargeAllocator final : c10::Allocator {
  struct Allocation {
    cpu::MemoryBlock block;
    int64_t used;
  };

  c10::DataPtr allocate(size_t size) override {
    const auto block = cpu::take_memory(size);
    if (block.data == nullptr) return c10::GetCPUAllocator()->allocate(size);
    auto* allocation = new Allocation{block, static_cast<int64_t>(size)};
    c10::reportMemoryUsageToProfiler(block.data, allocation->used, 0, 0, at::kCPU);
    return {block.data, allocation, &give_back, at::kCPU};
  }

  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }

  static void give_back(void* context) {
    auto* allocation = static_cast<Allocation*>(context);
    c10::reportMemoryUsageToProfiler(allocation->block.data, -allocation->used, 0, 0, at::kCPU);
    cpu::give_memory(allocation->block);
    delete allocation;
  }
};

Tensor empty_rows_like(const Tensor& x, c10::SymInt num_rows) {
  auto sizes = x.sym_sizes().vec();
  sizes.at(0) = std::move(num_rows);
  if (!x.is_cpu()) return x.new_empty_symint(sizes);
  return empty_rows(C10_AS_INTARRAYREF_SLOW(sizes), x.options());
}

}  // namespace

Tensor empty_rows(at::IntArrayRef sizes, const at::TensorOptions& options) {
  static LargeAllocator large;
  return Tensor(at::detail::empty_generic(sizes, &large, c10::DispatchKeySet(c10::DispatchKey::CPU),
                                          c10::typeMetaToScalarType(options.dtype()),
                                          /*memory_format_opt=*/std::nullopt));
}

}  // namespace moe_ext

TORCH_LIBRARY_IMPL(moe_ext, CompositeExplicitAutograd, m) {
  moe_ext::implement<"_empty_rows", &moe_ext::empty_rows_like>(m);
}
