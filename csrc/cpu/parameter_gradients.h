// The gradients of the experts' parameters: dW = A^T dZ, and db = the sum of the rows of dZ.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "../kernels/types.h"
#include "../math/integers.h"
#include "arena.h"
#include "backward_schedule.h"
#include "elementwise.h"
#include "gemm/gemm.h"
#include "memory.h"
#include "vectorize.h"

namespace moe_ext::cpu {

// Computes the gradients of an expert with one block from that block. The blocks of a split expert
// save their rows first, so that each gradient is one sum over all rows. The sums of single blocks
// need no memory, and the results do not depend on the number of threads.
template <typename scalar_t>
class ParameterGradients {
 public:
  using acc_t = acc_type<scalar_t>;

  // A linear layer with the input a [R, fan_in] and dz [R, columns], the gradient of its output. A
  // gradient has the experts in sequence in memory; it is null if it is not needed.
  struct Layer {
    int64_t fan_in, columns;
    bool transposed;  // whether dW is stored as [columns, fan_in]
    scalar_t *weight, *bias = nullptr;
    int64_t num_rows() const { return transposed ? columns : fan_in; }
  };

  // The memory of a thread, for layers that are at most as wide as `widest`.
  struct Workspace {
    Workspace(Arena& arena, const GemmWorkspace<scalar_t>& gemm, int64_t widest)
        : gemm(gemm),
          sums(arena.take<acc_t>(
              std::max(kSame ? 0 : widest, rounded_sums_size<scalar_t>(widest, widest)))),
          group(arena.take<acc_t>(widest)) {}

    GemmWorkspace<scalar_t> gemm;
    acc_t* sums;   // sums to be rounded
    acc_t* group;  // the sum of a group of rows, as wide as a layer
  };

  ParameterGradients(std::vector<Layer> layers, int64_t num_experts) : layers_(std::move(layers)) {
    const auto gradient = [](scalar_t* data, int64_t size) {
      return Gradient{.data = data, .size = data != nullptr ? size : 0};
    };
    int64_t size = 0;
    for (int64_t l = 0; l < num_layers(); ++l) {
      const Layer& layer = layers_[l];
      weights_.push_back(gradient(layer.weight, layer.fan_in * layer.columns));
      biases_.push_back(gradient(layer.bias, layer.columns));
      size += num_experts * (weights_[l].size + biases_[l].size);
      if (needs_weight(l)) {
        const int64_t num_parts = ceil_div(layer.num_rows(), kFullRateRows);
        for (int64_t part = 0; part < num_parts; ++part) {
          parts_.push_back({.layer = l, .rows = part_of(layer.num_rows(), part, num_parts)});
        }
      }
      if (needs_bias(l)) parts_.push_back({.layer = l, .rows = {}});
      saved_a_.push_back(needs_weight(l) ? layer.fan_in : 0);
      saved_dz_.push_back(needs_weight(l) || needs_bias(l) ? layer.columns : 0);
    }
    // Gradients that do not fit into the caches are not read again soon, so they bypass the caches.
    constexpr int64_t kLarge = 8 << 20;
    if (size * static_cast<int64_t>(sizeof(acc_t)) > kLarge) write_ = Write::kStream;
  }

  bool needs_weight(int64_t layer) const { return weights_[layer].size > 0; }
  bool needs_bias(int64_t layer) const { return biases_[layer].size > 0; }

  // The number of parts of the gradients of a split expert.
  int64_t num_parts() const { return static_cast<int64_t>(parts_.size()); }

  // Takes memory for the rows of the split experts.
  void reserve(const BackwardSchedule& schedule) {
    rows_per_slot_ = schedule.most_rows();
    Arena counter;
    for (int64_t l = 0; l < num_layers(); ++l) take_saved(counter, l);
    bytes_per_slot_ = counter.size();
    slots_ = Array<std::byte>(schedule.num_slots() * bytes_per_slot_);
  }

  // Takes the rows of a block for a layer, a [R, fan_in] and dz [R, columns]. Computes the
  // gradients, or saves the rows of a split expert.
  void add(const Block& block, const SplitExpert* split, int64_t layer, const scalar_t* a,
           const acc_t* dz, const Workspace& workspace) const {
    if (split == nullptr) {
      const int64_t num_rows = block.num_rows;
      if (needs_weight(layer)) {
        weight(block.expert, {layer, {0, layers_[layer].num_rows()}}, num_rows, a, dz, workspace);
      }
      if (needs_bias(layer)) bias(block.expert, layer, num_rows, dz, workspace);
      return;
    }
    const auto [saved_a, saved_dz] = saved(*split, layer);
    const int64_t row = block.first_row - split->first_row;
    const int64_t width_a = saved_a_[layer], width_dz = saved_dz_[layer];
    std::copy_n(a, block.num_rows * width_a, saved_a + row * width_a);
    std::copy_n(dz, block.num_rows * width_dz, saved_dz + row * width_dz);
  }

  // Computes a part of the gradients of a split expert.
  void compute_part(const SplitExpert& split, int64_t index, const Workspace& workspace) const {
    const GradientPart& part = parts_[index];
    const auto [a, dz] = saved(split, part.layer);
    if (part.rows.size() > 0) {
      weight(split.expert, part, split.num_rows, a, dz, workspace);
    } else {
      bias(split.expert, part.layer, split.num_rows, dz, workspace);
    }
  }

  // Writes the gradients of an expert without rows.
  void write_zeros(const Block& block) const {
    for (const auto& list : {weights_, biases_}) {
      for (const Gradient& each : list) {
        std::fill_n(each.data + block.expert * each.size, each.size, scalar_t(0));
      }
    }
  }

 private:
  static constexpr bool kSame = std::is_same_v<scalar_t, acc_t>;

  struct Gradient {
    scalar_t* data;
    int64_t size;  // elements of one expert
  };

  // Rows of dW of a layer or, if there are none, its db.
  struct GradientPart {
    int64_t layer;
    Part rows;
  };

  int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }

  // Takes memory for the rows of A and dZ of a layer in a slot.
  std::pair<scalar_t*, acc_t*> take_saved(Arena& slot, int64_t layer) const {
    acc_t* dz = slot.take<acc_t>(rows_per_slot_ * saved_dz_[layer]);
    return {slot.take<scalar_t>(rows_per_slot_ * saved_a_[layer]), dz};
  }

  // The rows of A and dZ that a split expert saves for a layer.
  std::pair<scalar_t*, acc_t*> saved(const SplitExpert& split, int64_t layer) const {
    Arena slot(slots_.data() + split.slot * bytes_per_slot_, bytes_per_slot_);
    for (int64_t l = 0; l < layer; ++l) take_saved(slot, l);
    return take_saved(slot, layer);
  }

  void weight(int64_t expert, const GradientPart& part, int64_t num_rows, const scalar_t* a,
              const acc_t* dz, const Workspace& workspace) const {
    const Layer& layer = layers_[part.layer];
    const int64_t fan_in = layer.fan_in, columns = layer.columns;
    const Gradient& gradient = weights_[part.layer];
    scalar_t* to = gradient.data + expert * gradient.size;
    if (layer.transposed) {
      product(part.rows, fan_in, num_rows, plain(dz, columns), plain(a, fan_in), to, workspace);
    } else {
      product(part.rows, columns, num_rows, plain(a, fan_in), plain(dz, columns), to, workspace);
    }
  }

  // Writes some rows of left^T right.
  template <typename left_t, typename right_t>
  void product(const Part& rows, int64_t n, int64_t num_rows, Operand<left_t> left,
               Operand<right_t> right, scalar_t* to, const Workspace& workspace) const {
    left.data += rows.begin;
    gemm_rounded<scalar_t>(rows.size(), n, num_rows, transpose(left), right, write_,
                           to + rows.begin * n, workspace.sums, workspace.gemm);
  }

  void bias(int64_t expert, int64_t layer, int64_t num_rows, const acc_t* dz,
            const Workspace& workspace) const {
    const int64_t columns = layers_[layer].columns;
    scalar_t* to = biases_[layer].data + expert * columns;
    if constexpr (kSame) {
      vectorized<SumOfRows>(dz, num_rows, columns, workspace.group, to);
    } else {
      vectorized<SumOfRows>(dz, num_rows, columns, workspace.group, workspace.sums);
      vectorized<Convert>(static_cast<const acc_t*>(workspace.sums), columns, to);
    }
  }

  std::vector<Layer> layers_;
  std::vector<Gradient> weights_, biases_;  // of each layer
  std::vector<GradientPart> parts_;
  Write write_ = Write::kReplace;
  // The widths of the rows of A and dZ that a split expert saves for each layer.
  std::vector<int64_t> saved_a_, saved_dz_;
  int64_t rows_per_slot_ = 0, bytes_per_slot_ = 0;
  Array<std::byte> slots_;  // of the schedule
};

}  // namespace moe_ext::cpu
