// The dispatch plan on the CPU: a stable counting sort of the slots by expert.
#include "../kernels/dispatch.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "parallel.h"

namespace moe_ext {

// Slots are counted and placed in blocks, each with its own histogram. A stable sort has only one
// result, so it does not depend on the number of blocks.
void DispatchPlan::on_cpu() const {
  const int64_t worth = num_rows / std::max<int64_t>(65536, 4 * num_experts);
  const int64_t num_blocks = std::clamp<int64_t>(worth, 1, cpu::num_threads());
  const int64_t block = (num_rows + num_blocks - 1) / num_blocks;
  std::vector<int64_t> next(num_blocks * num_experts, 0);
  const auto for_each_block = [&](auto body) {
    cpu::parallel_for(num_blocks, block, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        body(next.data() + b * num_experts, b * block, std::min(num_rows, (b + 1) * block));
      }
    });
  };

  for_each_block([&](int64_t* count, int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) ++count[expert_index[slot]];
  });

  // Converts the counts to the first row of each (expert, block).
  int64_t row = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    offsets[expert] = row;
    for (int64_t b = 0; b < num_blocks; ++b) {
      row += std::exchange(next[b * num_experts + expert], row);
    }
    tokens_per_expert[expert] = row - offsets[expert];
  }
  offsets[num_experts] = row;

  for_each_block([&](int64_t* first_free, int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      const int64_t placed = first_free[expert_index[slot]]++;
      permutation[placed] = slot;
      inverse[slot] = placed;
    }
  });
}

MOE_EXT_DEFINE_ON_CPU(DispatchPlan)

}  // namespace moe_ext
