#include "threads.h"

namespace moe_ext::cpu {
namespace {

int64_t one_thread() { return 1; }

void in_sequence(int64_t size, int64_t, void (*body)(void*, int64_t, int64_t), void* context) {
  if (size > 0) body(context, 0, size);
}

int64_t (*num_threads_of_pool)() = one_thread;
ParallelFor parallel_for_in_use = in_sequence;

}  // namespace

void set_thread_pool(int64_t (*num_threads)(), ParallelFor parallel_for) {
  num_threads_of_pool = num_threads;
  parallel_for_in_use = parallel_for;
}

int64_t num_threads() { return num_threads_of_pool(); }
ParallelFor parallel_for_of_pool() { return parallel_for_in_use; }

}  // namespace moe_ext::cpu
