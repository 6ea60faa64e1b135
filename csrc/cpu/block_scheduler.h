// Distributes rows to threads: the rows of each expert are split into blocks, and a thread that
// finishes a block takes the next one.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "empty_rows.h"
#include "vectorize.h"

namespace moe_ext::cpu {

// Consecutive rows of one expert.
struct Block {
  int64_t expert;
  int64_t first_row;
  int64_t num_rows;
  int part;             // index among the blocks of the expert
  bool last;            // whether it is the last block of the expert
  int64_t split_index;  // index among the experts with several blocks; -1 for a single block
};

// Returns the blocks of all experts in row order, at least one for each expert. Expert e has the
// rows offsets[e] <= r < offsets[e + 1], or num_rows / num_experts rows if offsets is undefined.
// The blocks, and so the results, do not depend on the number of threads.
std::vector<Block> split_into_blocks(const at::Tensor& offsets, int64_t num_experts,
                                     int64_t num_rows);

// Calls body(block, workspace) for every block. Each thread has its own workspace of
// `workspace_size` elements. Blocks are handed out in order: when a thread gets a block, all
// earlier blocks are done or in progress. A block may therefore wait for earlier ones, as
// OrderedReduction does.
template <typename acc_t, typename Body>
void for_each_block(const std::vector<Block>& blocks, int64_t flops, int64_t workspace_size,
                    const at::TensorOptions& options, const Body& body) {
  constexpr int64_t kMinFlops = 1 << 18;  // for each thread
  isa();  // a bad MOE_EXT_ISA must raise here, not in the parallel region
  const int64_t num_blocks = static_cast<int64_t>(blocks.size());
  const int64_t num_threads =
      std::clamp<int64_t>(flops / kMinFlops, 1, torch::stable::get_num_threads());
  const bool may_wait = std::any_of(blocks.begin(), blocks.end(),
                                    [](const Block& block) { return block.split_index >= 0; });
  // Taking several blocks at a time saves atomic operations. A thread that waits for a block must
  // not hold other blocks that it has not started.
  const int64_t at_once = may_wait ? 1 : std::max<int64_t>(1, num_blocks / (32 * num_threads));
  at::Tensor workspaces = empty_rows({num_threads, workspace_size}, options);
  auto* workspace = workspaces.mutable_data_ptr<acc_t>();
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, num_threads, 1, [&](int64_t thread, int64_t) {
    for (int64_t first; (first = next.fetch_add(at_once)) < num_blocks;) {
      for (int64_t b = first; b < std::min(num_blocks, first + at_once); ++b) {
        body(blocks[b], workspace + thread * workspaces.size(1));
      }
    }
  });
}

}  // namespace moe_ext::cpu
