// Gives torch's thread pool and its profiler of memory to the kernels.
#include <c10/core/Allocator.h>
#include <torch/csrc/stable/ops.h>

#include "cpu/memory.h"
#include "cpu/threads.h"

namespace moe_ext {
namespace {

int64_t num_threads() { return torch::stable::get_num_threads(); }

void parallel_for(int64_t size, int64_t grain, void (*body)(void*, int64_t, int64_t),
                  void* context) {
  torch::stable::parallel_for(0, size, grain,
                              [&](int64_t begin, int64_t end) { body(context, begin, end); });
}

void report_memory(void* data, int64_t bytes) {
  c10::reportMemoryUsageToProfiler(data, bytes, 0, 0, at::kCPU);
}

const bool are_set = [] {
  cpu::set_thread_pool(num_threads, parallel_for);
  cpu::set_memory_report(report_memory);
  return true;
}();

}  // namespace
}  // namespace moe_ext
