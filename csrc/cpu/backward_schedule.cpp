#include "backward_schedule.h"

#include <algorithm>
#include <utility>

namespace moe_ext::cpu {

BackwardSchedule::BackwardSchedule(const std::vector<Block>& blocks, int64_t num_parts,
                                   int64_t num_threads)
    : num_parts_(static_cast<int>(num_parts)) {
  // The split experts whose parts are not in tasks_ yet, each with the number of tasks when its
  // last block was added. While a thread finishes that block, the others have blocks to do.
  std::deque<std::pair<const SplitExpert*, int64_t>> waiting;
  std::vector<const SplitExpert*> last_user;  // of each slot
  std::vector<int64_t> free_slots;
  const auto add_parts = [&] {
    const SplitExpert* expert = waiting.front().first;
    for (int64_t part = 0; part < num_parts; ++part) tasks_.push_back({nullptr, expert, part});
    free_slots.push_back(expert->slot);
    waiting.pop_front();
  };
  for (const Block& block : blocks) {
    SplitExpert* expert = nullptr;
    if (block.num_blocks > 1 && num_parts > 0) {
      if (block.index == 0) {
        if (free_slots.empty()) {
          free_slots.push_back(num_slots_++);
          last_user.push_back(nullptr);
        }
        const int64_t slot = free_slots.back();
        free_slots.pop_back();
        experts_.push_back({.index = static_cast<int64_t>(experts_.size()),
                            .expert = block.expert,
                            .first_row = block.first_row,
                            .num_rows = 0,
                            .slot = slot,
                            .before = last_user[slot],
                            .num_blocks = block.num_blocks});
        last_user[slot] = &experts_.back();
      }
      expert = &experts_.back();
      expert->num_rows += block.num_rows;
      most_rows_ = std::max(most_rows_, expert->num_rows);
    }
    tasks_.push_back({&block, expert, 0});
    if (expert != nullptr && block.index == block.num_blocks - 1) {
      waiting.emplace_back(expert, num_tasks());
    }
    while (!waiting.empty() && num_tasks() - waiting.front().second >= num_threads - 1) add_parts();
  }
  while (!waiting.empty()) add_parts();
  progress_ = Progress(2 * static_cast<int64_t>(experts_.size()));
}

}  // namespace moe_ext::cpu
