// The threads of the parallel loops.
#pragma once

#include <cstdint>

#include "../kernels/export.h"

namespace moe_ext::cpu {

// Calls body(context, begin, end) in parallel on ranges that cover [0, size), each of at least
// `grain` items but the last. Throws the exception of a range again.
using ParallelFor = void (*)(int64_t size, int64_t grain,
                             void (*body)(void* context, int64_t begin, int64_t end),
                             void* context);

// Sets the pool of threads. Without a pool, the loops run on the calling thread.
MOE_EXT_KERNEL_API void set_thread_pool(int64_t (*num_threads)(), ParallelFor parallel_for);

int64_t num_threads();
ParallelFor parallel_for_of_pool();

// Calls body(begin, end) in parallel; see ParallelFor.
template <typename Body>
void run_in_parallel(int64_t size, int64_t grain, const Body& body) {
  parallel_for_of_pool()(
      size, grain,
      [](void* context, int64_t begin, int64_t end) {
        (*static_cast<const Body*>(context))(begin, end);
      },
      const_cast<Body*>(&body));
}

}  // namespace moe_ext::cpu
