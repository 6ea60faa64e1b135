#include "block_scheduler.h"

#include <algorithm>

#include "../math/integers.h"

namespace moe_ext::cpu {

std::vector<Block> split_into_blocks(const int64_t* offsets, int64_t num_experts, int64_t num_rows,
                                     int64_t most_rows) {
  const int64_t each = num_rows / std::max<int64_t>(1, num_experts);
  std::vector<Block> blocks;
  blocks.reserve(num_experts + num_rows / most_rows);
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const int64_t first = offsets ? offsets[expert] : expert * each;
    const int64_t count = offsets ? offsets[expert + 1] - first : each;
    const int num_blocks = static_cast<int>(std::max<int64_t>(1, ceil_div(count, most_rows)));
    for (int index = 0; index < num_blocks; ++index) {
      const Part rows = part_of(count, index, num_blocks);
      blocks.push_back({.expert = expert,
                        .first_row = first + rows.begin,
                        .num_rows = rows.size(),
                        .index = index,
                        .num_blocks = num_blocks});
    }
  }
  return blocks;
}

bool leaves_threads_idle(const std::vector<Block>& blocks, int64_t num_threads) {
  constexpr int64_t kManyBlocks = 4;      // of each thread
  constexpr int64_t kRowsOfWeights = 16;  // in the time in which the weights are read
  constexpr double kMostIdle = 0.2;
  if (num_threads == 1) return false;
  std::vector<int64_t> busy(num_threads);
  int64_t total = 0, count = 0;
  for (const Block& block : blocks) {
    if (block.num_rows == 0) continue;
    if (++count == kManyBlocks * num_threads) return false;
    const int64_t time = block.num_rows + kRowsOfWeights;
    *std::ranges::min_element(busy) += time;
    total += time;
  }
  const int64_t time = *std::ranges::max_element(busy) * num_threads;
  return static_cast<double>(total) < (1 - kMostIdle) * static_cast<double>(time);
}

}  // namespace moe_ext::cpu
