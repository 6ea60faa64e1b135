// The backward pass of the experts on the CPU.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "../kernels/experts.h"
#include "backward_schedule.h"
#include "block_scheduler.h"
#include "elementwise.h"
#include "expert_backward.h"
#include "expert_network.h"
#include "expert_rows.h"
#include "gemm/gemm.h"
#include "parameter_gradients.h"

namespace moe_ext {
namespace cpu {
namespace {

// The gradient of the input of frozen experts with one layer, such as a packed linear layer. If
// they have too few blocks for all threads, threads share the columns of a block, and so read the
// weights once. The gradient does not depend on the number of parts.
template <typename scalar_t>
class InputGradientByColumns {
 public:
  using acc_t = acc_type<scalar_t>;

  InputGradientByColumns(const ExpertsBackward<scalar_t>& backward,
                         const ExpertNetwork<scalar_t>& network, int64_t num_threads)
      : backward_(backward),
        network_(network),
        blocks_(split_into_blocks(backward.input.offsets, network.num_experts(),
                                  backward.input.num_rows)),
        num_threads_(num_threads) {
    constexpr int64_t kTasksOfThread = 2, kMinColumns = 128;
    if (!leaves_threads_idle(blocks_, num_threads)) return;
    num_parts_ = std::min(kTasksOfThread * num_threads, fan_in_ / kMinColumns);
  }

  // Whether the experts have one layer, which is frozen.
  static bool applies(const ExpertsBackward<scalar_t>& backward,
                      const ExpertNetwork<scalar_t>& network) {
    return network.num_layers() == 1 && network.rank(0) == 0 && backward.first_learned > 0 &&
           backward.gates == nullptr;
  }

  // Whether a block has several parts.
  bool has_parts() const { return num_parts_ > 1; }

  void run() const {
    int64_t most_rows = 0, most_columns = 0;
    for (const Block& block : blocks_) most_rows = std::max(most_rows, block.num_rows);
    for (int64_t part = 0; part < num_parts_; ++part) {
      most_columns = std::max(most_columns, columns_of(part).size());
    }
    struct Workspace {
      GemmWorkspace<scalar_t> gemm;
      acc_t* product;
    };
    const auto take = [&](Arena& arena) {
      return Workspace{{arena, {{most_rows, most_columns, network_.columns(0)}}},
                       arena.take<acc_t>(most_rows * most_columns)};
    };
    for_each_task(num_parts_ * static_cast<int64_t>(blocks_.size()), /*progress=*/nullptr,
                  num_threads_, take, [&](int64_t task, const Workspace& workspace) {
                    compute(blocks_[task / num_parts_], columns_of(task % num_parts_), workspace);
                  });
  }

 private:
  Part columns_of(int64_t part) const {
    constexpr int64_t kMultiple = 64;  // cache lines
    const auto [begin, end] = part_of(ceil_div(fan_in_, kMultiple), part, num_parts_);
    return {begin * kMultiple, std::min(end * kMultiple, fan_in_)};
  }

  template <typename Workspace>
  void compute(const Block& block, Part range, const Workspace& workspace) const {
    const int64_t columns = network_.columns(0);
    gemm<scalar_t>(block.num_rows, range.size(), columns,
                   plain(backward_.grad + block.first_row * columns, columns),
                   columns_from(transpose(network_.weight(block.expert, 0)), range.begin),
                   Write::kReplace, workspace.product, workspace.gemm);
    const Region region{block.first_row, block.num_rows, range.begin, range.size()};
    vectorized<ConvertRegion>(static_cast<const acc_t*>(workspace.product), range.size(), region,
                              fan_in_, backward_.grad_rows);
  }

  const ExpertsBackward<scalar_t>& backward_;
  const ExpertNetwork<scalar_t>& network_;
  const std::vector<Block> blocks_;
  const int64_t num_threads_, fan_in_ = network_.fan_in(0);
  int64_t num_parts_ = 1;
};

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
  if (InputGradientByColumns<scalar_t>::applies(*this, network)) {
    const InputGradientByColumns<scalar_t> by_columns(*this, network, num_threads);
    if (by_columns.has_parts()) return by_columns.run();
  }
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
