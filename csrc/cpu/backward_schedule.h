// The order of the work in a backward pass of the experts. The gradients of an expert's parameters
// need the rows of all its blocks, so they come after its last block.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "block_scheduler.h"
#include "progress.h"

namespace moe_ext::cpu {

// An expert with several blocks. The blocks save their rows in a slot of memory, then the gradients
// are computed in parts.
struct SplitExpert {
  int64_t index;  // among the split experts
  int64_t expert, first_row;
  int64_t num_rows;
  int64_t slot;
  const SplitExpert* before;  // the expert that used the slot before, or null
  int num_blocks;
};

// Tasks: the blocks in row order and, some blocks after the last block of each split expert, the
// parts of its gradients.
class BackwardSchedule {
 public:
  // Without parts, no expert is split. The number of threads changes the order, not the results.
  BackwardSchedule(const std::vector<Block>& blocks, int64_t num_parts, int64_t num_threads);

  int64_t num_tasks() const { return static_cast<int64_t>(tasks_.size()); }
  // What the tasks wait for; null if they do not wait.
  Progress* progress() { return experts_.empty() ? nullptr : &progress_; }
  int64_t num_slots() const { return num_slots_; }
  int64_t most_rows() const { return most_rows_; }  // of a split expert

  // Runs a task: block(block, split_expert), where split_expert may be null, or
  // part(split_expert, index of the part). Waits for earlier tasks only.
  template <typename RunBlock, typename RunPart>
  void run(int64_t task, const RunBlock& block, const RunPart& part) {
    const auto& [its_block, expert, its_part] = tasks_[task];
    if (its_block == nullptr) {
      progress_.wait(blocks_of(*expert), expert->num_blocks);
      part(*expert, its_part);
      progress_.advance(parts_of(*expert));
      return;
    }
    if (expert != nullptr && expert->before != nullptr) {
      progress_.wait(parts_of(*expert->before), num_parts_);
    }
    block(*its_block, expert);
    if (expert != nullptr) progress_.advance(blocks_of(*expert));
  }

 private:
  struct Task {
    const Block* block;         // null: a part
    const SplitExpert* expert;  // null: the block is the only one of its expert
    int64_t part;
  };

  // The counts of the finished blocks and parts of an expert.
  static int64_t blocks_of(const SplitExpert& expert) { return 2 * expert.index; }
  static int64_t parts_of(const SplitExpert& expert) { return 2 * expert.index + 1; }

  const int num_parts_;
  std::vector<Task> tasks_;
  std::deque<SplitExpert> experts_;
  Progress progress_{0};
  int64_t num_slots_ = 0, most_rows_ = 0;
};

}  // namespace moe_ext::cpu
