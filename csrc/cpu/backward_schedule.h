// The order of the work in a backward pass of the experts. The gradients of an expert's parameters
// need the rows of all its blocks, so they come after its last block.
#pragma once

#include <cstdint>
#include <deque>
#include <latch>
#include <vector>

#include "block_scheduler.h"

namespace moe_ext::cpu {

// An expert with several blocks. The blocks save their rows in a slot of memory, then the gradients
// are computed in parts.
struct SplitExpert {
  SplitExpert(int64_t expert, int64_t first_row, int64_t slot, SplitExpert* before, int num_blocks,
              int64_t num_parts)
      : expert(expert),
        first_row(first_row),
        slot(slot),
        before(before),
        blocks(num_blocks),
        parts(num_parts) {}

  int64_t expert, first_row;
  int64_t num_rows = 0;
  int64_t slot;
  SplitExpert* before;       // the expert that used the slot before, or null
  std::latch blocks, parts;  // the unfinished ones
};

// Tasks: the blocks in row order and, some blocks after the last block of each split expert, the
// parts of its gradients.
class BackwardSchedule {
 public:
  // Without parts, no expert is split. The number of threads changes the order, not the results.
  BackwardSchedule(const std::vector<Block>& blocks, int64_t num_parts, int64_t num_threads);

  int64_t num_tasks() const { return static_cast<int64_t>(tasks_.size()); }
  bool has_split_experts() const { return !experts_.empty(); }
  int64_t num_slots() const { return num_slots_; }
  int64_t most_rows() const { return most_rows_; }  // of a split expert

  // Runs a task: block(block, split_expert), where split_expert may be null, or
  // part(split_expert, index of the part). Waits for earlier tasks only.
  template <typename RunBlock, typename RunPart>
  void run(int64_t task, const RunBlock& block, const RunPart& part) {
    auto& [its_block, expert, its_part] = tasks_[task];
    if (its_block == nullptr) {
      expert->blocks.wait();
      part(*expert, its_part);
      expert->parts.count_down();
      return;
    }
    if (expert != nullptr && expert->before != nullptr) expert->before->parts.wait();
    block(*its_block, expert);
    if (expert != nullptr) expert->blocks.count_down();
  }

 private:
  struct Task {
    const Block* block;   // null: a part
    SplitExpert* expert;  // null: the block is the only one of its expert
    int64_t part;
  };

  std::vector<Task> tasks_;
  std::deque<SplitExpert> experts_;
  int64_t num_slots_ = 0, most_rows_ = 0;
};

}  // namespace moe_ext::cpu
