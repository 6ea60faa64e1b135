#include "block_scheduler.h"

#include "../math/integers.h"
#include "gemm/gemm.h"

namespace moe_ext::cpu {

std::vector<Block> split_into_blocks(const int64_t* offsets, int64_t num_experts,
                                     int64_t num_rows) {
  const int64_t each = num_rows / std::max<int64_t>(1, num_experts);
  std::vector<Block> blocks;
  blocks.reserve(num_experts + num_rows / kFullRateRows);
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const int64_t first = offsets ? offsets[expert] : expert * each;
    const int64_t count = offsets ? offsets[expert + 1] - first : each;
    const int num_blocks = static_cast<int>(std::max<int64_t>(1, ceil_div(count, kFullRateRows)));
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

}  // namespace moe_ext::cpu
