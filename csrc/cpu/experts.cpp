// The networks of the experts on the CPU: gather of the tokens and feed-forward networks, a block
// of one expert's rows at a time, in cache. With few blocks, see experts_by_columns.h.
#include "../kernels/experts.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "block_scheduler.h"
#include "expert_activations.h"
#include "expert_network.h"
#include "expert_rows.h"
#include "experts_by_columns.h"

namespace moe_ext {
using namespace cpu;

template <typename scalar_t>
void ExpertsForward<scalar_t>::on_cpu() const {
  using Network = ExpertNetwork<scalar_t>;
  using acc_t = typename Network::acc_t;
  const Network network(this->network);
  const ExpertRows<scalar_t> expert_rows(
      input, network.fan_in(0),
      split_into_blocks(input.offsets, network.num_experts(), input.num_rows));
  const int64_t last = network.num_layers() - 1, width = network.columns(last);
  const int64_t num_threads = num_threads_for(expert_rows.count() * network.flops_per_row());
  if (ExpertsByColumns<scalar_t> by_columns(network, expert_rows, hidden, num_threads, rows);
      by_columns.has_parts()) {
    return by_columns.run();
  }
  struct Workspace {
    typename Network::Workspace products;
    Activations<scalar_t> activations;
    acc_t* product;
  };
  const auto take = [&](Arena& arena) {
    const int64_t num_rows = expert_rows.most_in_block();
    return Workspace{{arena, network, num_rows, /*rows_of_expert=*/0},
                     {arena, network, expert_rows, /*keeps_z=*/false},
                     arena.take<acc_t>(Network::kSame ? 0 : num_rows * network.widest())};
  };
  const auto& blocks = expert_rows.blocks();
  for_each_task(static_cast<int64_t>(blocks.size()), /*progress=*/nullptr, num_threads, take,
                [&](int64_t task, const Workspace& workspace) {
                  const Block& block = blocks[task];
                  if (block.num_rows == 0) return;
                  Activations<scalar_t> a = workspace.activations;
                  a.take_rows(block, network, expert_rows, hidden);
                  a.compute_hidden(block, network, workspace.products,
                                   {workspace.product, workspace.product});
                  scalar_t* out = rows + block.first_row * width;
                  Epilogue<scalar_t> epilogue;
                  if (const Block* next = expert_rows.after(block)) {
                    epilogue.next_b = network.weight(next->expert, 0);
                  }
                  if constexpr (Network::kSame) {
                    network.linear(block, last, network.all_columns(last), a.input(last), out,
                                   workspace.products, epilogue);
                  } else {
                    const auto round = [&](const Region& region, const acc_t* sums, int64_t ld) {
                      vectorized<ConvertRegion>(sums, ld, region, width, out);
                    };
                    epilogue.run = round;
                    network.linear(block, last, network.all_columns(last), a.input(last),
                                   workspace.product, workspace.products, epilogue);
                  }
                });
}
MOE_EXT_DEFINE_RUN_ON_CPU(ExpertsForward)

}  // namespace moe_ext
