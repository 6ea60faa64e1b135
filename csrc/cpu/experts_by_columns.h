// The networks of experts with too few blocks for all threads: threads share the columns of each
// layer of a block.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "../math/integers.h"
#include "block_scheduler.h"
#include "elementwise.h"
#include "expert_network.h"
#include "expert_rows.h"
#include "memory.h"
#include "progress.h"
#include "vectorize.h"

namespace moe_ext::cpu {

// Splits each layer of a block into parts, which compute some of its outputs. The parts of the next
// layer wait for all of them. The outputs are bitwise identical for any number of parts.
template <typename scalar_t>
class ExpertsByColumns {
 public:
  using Network = ExpertNetwork<scalar_t>;
  using Rows = ExpertRows<scalar_t>;
  using acc_t = typename Network::acc_t;

  ExpertsByColumns(const Network& network, const Rows& rows, std::span<scalar_t* const> hidden,
                   int64_t num_threads, scalar_t* out)
      : network_(network),
        rows_(rows),
        hidden_(hidden),
        num_threads_(num_threads),
        out_(out),
        num_parts_(most_useful_parts()) {}

  // Whether a block has several parts.
  bool has_parts() const { return num_parts_ > 1; }

  void run() {
    const auto& blocks = rows_.blocks();
    for (int64_t l = 0; l <= last_; ++l) {
      for (const Block& block : blocks) {
        for (int64_t part = 0; block.num_rows > 0 && part < num_parts_; ++part) {
          tasks_.push_back({.block = &block, .layer = l, .part = part});
        }
      }
    }
    for (int64_t l = 0; l < last_; ++l) {
      z_.emplace_back(hidden_.empty() ? rows_.count() * network_.columns(l) : 0);
      activations_.emplace_back(rows_.count() * num_outputs(l));
    }
    Progress done(static_cast<int64_t>(blocks.size()));  // the tasks of each block
    for_each_task(
        static_cast<int64_t>(tasks_.size()), &done, num_threads_,
        [&](Arena& arena) { return Workspace(arena, *this); },
        [&](int64_t index, const Workspace& workspace) {
          const Task& task = tasks_[index];
          const int64_t block = task.block - blocks.data();
          done.wait(block, static_cast<int>(task.layer * num_parts_));
          compute(index, workspace);
          done.advance(block);
        });
  }

 private:
  struct Task {
    const Block* block;
    int64_t layer, part;
  };

  struct Workspace {
    Workspace(Arena& arena, const ExpertsByColumns& in)
        : products(arena, in.network_, in.rows_.most_in_block(), /*rows_of_expert=*/0),
          gathered(arena.take<scalar_t>(
              in.rows_.has_slots() ? in.rows_.most_in_block() * in.network_.fan_in(0) : 0)),
          product(arena.take<acc_t>(in.rows_.most_in_block() * in.most_columns())) {}

    typename Network::Workspace products;
    scalar_t* gathered;  // the rows of a block
    acc_t* product;      // [num_rows, columns] of a part
  };

  // The outputs of a layer: of a hidden layer, those of the activation.
  int64_t num_outputs(int64_t layer) const {
    return layer == last_ ? network_.columns(layer) : network_.fan_in(layer + 1);
  }

  // The columns of an output are adjacent, or each is in one half of the columns.
  bool is_gated(int64_t layer) const { return network_.columns(layer) != num_outputs(layer); }
  int64_t num_halves(int64_t layer) const {
    return is_gated(layer) && !network_.function.interleaved ? 2 : 1;
  }

  int64_t most_useful_parts() const {
    constexpr int64_t kTasksOfThread = 2;  // in a layer
    constexpr int64_t kMinOutputs = 128;   // several cache lines of a row
    constexpr int64_t kMaxBytes = 64 << 20;
    if (!leaves_threads_idle(rows_.blocks(), num_threads_)) return 1;
    const int64_t num_blocks = std::ranges::count_if(
        rows_.blocks(), [](const Block& block) { return block.num_rows > 0; });
    int64_t parts = std::max(ceil_div(kTasksOfThread * num_threads_, num_blocks), int64_t{2});
    int64_t bytes_of_row = 0;
    for (int64_t l = 0; l <= last_; ++l) {
      parts = std::min(parts, num_outputs(l) / kMinOutputs);
      if (num_halves(l) == 2 && num_outputs(l) % kMultiple != 0) return 1;
      if (l == last_) continue;
      bytes_of_row += (network_.columns(l) + num_outputs(l)) * sizeof(scalar_t);
    }
    return bytes_of_row * rows_.count() <= kMaxBytes ? parts : 1;
  }

  // The columns of a part in a half. They begin at a multiple of kMultiple.
  Part columns_of(int64_t layer, int64_t part, int64_t half) const {
    const int64_t size = num_outputs(layer);
    const auto [begin, end] = part_of(size / kMultiple, part, num_parts_);
    const int64_t last = part + 1 == num_parts_ ? size : end * kMultiple;
    const int64_t adjacent = is_gated(layer) && num_halves(layer) == 1 ? 2 : 1;
    return {half * size + adjacent * begin * kMultiple, half * size + adjacent * last};
  }

  int64_t most_columns() const {
    int64_t most = 0;
    for (const Task& task : tasks_) {
      most = std::max(most, columns_of(task.layer, task.part, /*half=*/0).size());
    }
    return most;
  }

  scalar_t* z(int64_t layer) const { return hidden_.empty() ? z_[layer].data() : hidden_[layer]; }

  // The weight of a task, from its first column on.
  Operand<scalar_t> weight(const Task& task) const {
    return columns_from(network_.weight(task.block->expert, task.layer),
                        columns_of(task.layer, task.part, /*half=*/0).begin);
  }

  void compute(size_t index, const Workspace& workspace) const {
    const auto& [block, layer, part] = tasks_[index];
    const int64_t width = network_.columns(layer), first_row = block->first_row;
    const scalar_t* in = layer == 0
                             ? rows_.gather(*block, workspace.gathered)
                             : activations_[layer - 1].data() + first_row * network_.fan_in(layer);
    Epilogue<scalar_t> epilogue;
    if (index + num_threads_ < tasks_.size()) {
      epilogue.next_b = weight(tasks_[index + num_threads_]);
    }
    Part range{};
    for (int64_t half = 0; half < num_halves(layer); ++half) {
      range = columns_of(layer, part, half);
      network_.linear(*block, layer, range, in, workspace.product, workspace.products, epilogue);
      const auto write = [&](auto* matrix) {
        const auto* product = static_cast<const acc_t*>(workspace.product);
        const Region region{first_row, block->num_rows, range.begin, range.size()};
        vectorized<ConvertRegion>(product, range.size(), region, width, matrix);
      };
      write(layer == last_ ? out_ : z(layer));
    }
    if (layer < last_) {
      const Region region{0, block->num_rows, range.begin, range.size()};
      const int64_t size = num_outputs(layer);
      network_.function.activate(z(layer) + first_row * width, region, size,
                                 activations_[layer].data() + first_row * size);
    }
  }

  static constexpr int64_t kMultiple = 32;  // of columns that all kernels read in place

  const Network& network_;
  const Rows& rows_;
  const std::span<scalar_t* const> hidden_;
  const int64_t num_threads_, last_ = network_.num_layers() - 1;
  scalar_t* const out_;
  const int64_t num_parts_;
  std::vector<Task> tasks_;                   // layer by layer
  std::vector<Array<scalar_t>> z_;            // [R, columns] of each hidden layer
  std::vector<Array<scalar_t>> activations_;  // [R, outputs] of each hidden layer
};

}  // namespace moe_ext::cpu
