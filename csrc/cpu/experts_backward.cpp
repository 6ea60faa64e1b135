// The backward pass of the experts on the CPU.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "../kernels/experts.h"
#include "backward_schedule.h"
#include "block_scheduler.h"
#include "expert_backward.h"
#include "expert_network.h"
#include "expert_rows.h"
#include "parameter_gradients.h"

namespace moe_ext {
namespace cpu {
namespace {

// Returns the blocks of the rows; smaller ones if threads would be idle. The results do not depend
// on the blocks.
template <typename scalar_t>
std::vector<Block> blocks_for(const ExpertInput<scalar_t>& input, int64_t num_experts,
                              int64_t num_threads) {
  constexpr int64_t kBlocksOfThread = 2, kMinRows = 64;
  const auto split = [&](int64_t most_rows) {
    return split_into_blocks(input.offsets, num_experts, input.num_rows, most_rows);
  };
  std::vector<Block> blocks = split(kFullRateRows);
  if (!leaves_threads_idle(blocks, num_threads)) return blocks;
  return split(
      std::clamp(ceil_div(input.num_rows, kBlocksOfThread * num_threads), kMinRows, kFullRateRows));
}

}  // namespace
}  // namespace cpu
using namespace cpu;

template <typename scalar_t>
void ExpertsBackward<scalar_t>::on_cpu() const {
  using Backward = BlockBackward<scalar_t>;
  const ExpertNetwork<scalar_t> network(this->network);
  const int64_t num_threads = num_threads_for(2 * input.num_rows * network.flops_per_row());
  const ExpertRows<scalar_t> expert_rows(input, network.fan_in(0),
                                         blocks_for(input, network.num_experts(), num_threads));
  ParameterGradients<scalar_t> parameters(
      LearnedLayers<scalar_t>(network).with_gradients(this->gradients), network.num_experts());
  BackwardSchedule schedule(expert_rows.blocks(), parameters.num_parts(), num_threads);
  parameters.reserve(schedule);
  const Gradients<scalar_t> gradients{.network = network,
                                      .rows = expert_rows,
                                      .hidden = hidden,
                                      .grad_out = grad,
                                      .gates = gates,
                                      .grad_gates = grad_gates,
                                      .grad_rows = grad_rows,
                                      .parameters = parameters,
                                      .first_learned = first_learned};
  for_each_task(
      schedule.num_tasks(), schedule.progress(), num_threads,
      [&](Arena& arena) { return typename Backward::Workspace(arena, gradients); },
      [&](int64_t task, const typename Backward::Workspace& workspace) {
        schedule.run(
            task,
            [&](const Block& block, const SplitExpert* split) {
              if (block.num_rows == 0) return parameters.write_zeros(block);
              Backward(gradients, block, split, workspace).run();
            },
            [&](const SplitExpert& split, int64_t part) {
              parameters.compute_part(split, part, workspace.parameters);
            });
      });
}
MOE_EXT_DEFINE_RUN_ON_CPU(ExpertsBackward)

}  // namespace moe_ext
