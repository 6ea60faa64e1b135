// Distributes rows to threads: the rows of each expert are split into blocks, and a thread that
// finishes a block takes the next one.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <vector>

#include "arena.h"
#include "gemm/gemm.h"
#include "memory.h"
#include "progress.h"
#include "subnormals.h"
#include "threads.h"
#include "vectorize.h"

namespace moe_ext::cpu {

// Consecutive rows of one expert.
struct Block {
  int64_t expert;
  int64_t first_row;
  int64_t num_rows;
  int index, num_blocks;  // among the blocks of the expert
};

// Returns the blocks of all experts in row order, at least one for each expert. Expert e has the
// rows offsets[e] <= r < offsets[e + 1], or num_rows / num_experts rows if offsets is null.
// A block has at most `most_rows` rows.
std::vector<Block> split_into_blocks(const int64_t* offsets, int64_t num_experts, int64_t num_rows,
                                     int64_t most_rows = kFullRateRows);

// Whether the threads would often have nothing to do if each takes a whole block at a time.
bool leaves_threads_idle(const std::vector<Block>& blocks, int64_t num_threads);

// Calls body(task, workspace) for all tasks, 0 <= task < num_tasks. Each thread has its own
// workspace: what take(arena) returns. Tasks are handed out in order: when a thread gets a task,
// all earlier tasks are done or in progress. With `progress`, a task may therefore wait for earlier
// ones. If a task throws, the waits of the others end, later tasks may not run, and the exception
// is thrown again.
template <typename Take, typename Body>
void for_each_task(int64_t num_tasks, Progress* progress, int64_t num_threads, const Take& take,
                   const Body& body) {
  isa();  // a bad MOE_EXT_ISA must raise here, not in the parallel region
  // Taking several tasks at a time saves atomic operations. A thread that waits for a task must not
  // hold other tasks that it has not started.
  const bool may_wait = progress != nullptr;
  const int64_t at_once = may_wait ? 1 : std::max<int64_t>(1, num_tasks / (32 * num_threads));
  Arena counter;
  take(counter);
  const Array<std::byte> memory(num_threads * counter.size());
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;  // of the task that failed first
  run_in_parallel(num_threads, 1, [&](int64_t thread, int64_t) {
    const FlushSubnormals flush;
    try {
      Arena arena(memory.data() + thread * counter.size(), counter.size());
      const auto workspace = take(arena);
      for (int64_t first; !failed && (first = next.fetch_add(at_once)) < num_tasks;) {
        for (int64_t task = first; task < std::min(num_tasks, first + at_once); ++task) {
          body(task, workspace);
        }
      }
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
      if (progress != nullptr) progress->fail();
    }
  });
  if (error) std::rethrow_exception(error);
}

// Returns the number of threads that is worth its cost.
inline int64_t num_threads_for(int64_t flops) {
  constexpr int64_t kMinFlops = 1 << 18;  // for each thread
  return std::clamp<int64_t>(flops / kMinFlops, 1, num_threads());
}

}  // namespace moe_ext::cpu
