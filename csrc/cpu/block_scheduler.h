// Which thread works on which rows: the rows of each expert are split into blocks, and each thread
// takes the next block when it is done with one.
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
  int64_t split_index;  // index among the experts that have several blocks, or -1 for an only block
};

// The blocks of all experts in the order of the rows, at least one for each expert. Expert e has
// rows offsets[e] up to offsets[e + 1], or an equal share of num_rows if offsets is undefined. The
// blocks do not depend on the number of threads, so neither do the results.
std::vector<Block> split_into_blocks(const at::Tensor& offsets, int64_t num_experts,
                                     int64_t num_rows);

// Calls body(block, workspace) for every block, where each thread has a workspace of its own for
// `workspace_size` numbers. The blocks are handed out in order: when a thread gets a block, those
// before it are done or under way. It may therefore wait for them, as OrderedReduction does.
template <typename acc_t, typename Body>
void for_each_block(const std::vector<Block>& blocks, int64_t flops, int64_t workspace_size,
                    const at::TensorOptions& options, const Body& body) {
  constexpr int64_t kMinFlops = 1 << 18;  // for each thread
  isa();  // an error in MOE_EXT_ISA must not first come up in the parallel region
  const int64_t num_blocks = static_cast<int64_t>(blocks.size());
  const int64_t num_threads =
      std::clamp<int64_t>(flops / kMinFlops, 1, torch::stable::get_num_threads());
  const bool may_wait = std::any_of(blocks.begin(), blocks.end(),
                                    [](const Block& block) { return block.split_index >= 0; });
  // Several blocks at once spare the atomic counter. A thread that waits for a block must not hold
  // back another one that it has taken.
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
