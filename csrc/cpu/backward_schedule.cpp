#include "backward_schedule.h"

#include <algorithm>
#include <utility>

namespace moe_ext::cpu {

BackwardSchedule::BackwardSchedule(const std::vector<Block>& blocks, int64_t num_parts,
                                   int64_t num_threads) {
  // The split experts whose parts are not in tasks_ yet, each with the number of tasks when its
  // last block was added. While a thread finishes that block, the others have blocks to do.
  std::deque<std::pair<SplitExpert*, int64_t>> waiting;
  std::vector<SplitExpert*> last_user;  // of each slot
  std::vector<int64_t> free_slots;
  const auto add_parts = [&] {
    SplitExpert* expert = waiting.front().first;
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
        experts_.emplace_back(block.expert, block.first_row, slot, last_user[slot],
                              block.num_blocks, num_parts);
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
}

}  // namespace moe_ext::cpu
