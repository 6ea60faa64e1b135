#include "block_scheduler.h"

#include "../math/integers.h"

namespace moe_ext::cpu {
namespace {

// The maximum number of rows in a block; it is large enough for the full GEMM rate.
constexpr int64_t kMaxBlockRows = 640;

}  // namespace

std::vector<Block> split_into_blocks(const int64_t* offsets, int64_t num_experts,
                                     int64_t num_rows) {
  const int64_t each = num_rows / std::max<int64_t>(1, num_experts);
  std::vector<Block> blocks;
  blocks.reserve(num_experts + num_rows / kMaxBlockRows);
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const int64_t first = offsets ? offsets[expert] : expert * each;
    const int64_t count = offsets ? offsets[expert + 1] - first : each;
    const int num_blocks = static_cast<int>(std::max<int64_t>(1, ceil_div(count, kMaxBlockRows)));
    for (int index = 0; index < num_blocks; ++index) {
      const int64_t begin = index * count / num_blocks;
      const int64_t end = (index + 1) * count / num_blocks;
      blocks.push_back({.expert = expert,
                        .first_row = first + begin,
                        .num_rows = end - begin,
                        .index = index,
                        .num_blocks = num_blocks});
    }
  }
  return blocks;
}

}  // namespace moe_ext::cpu
