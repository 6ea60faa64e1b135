// The layers of the experts' networks, and their products with the rows of a block.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "../kernels/experts.h"
#include "../math/integers.h"
#include "activation_function.h"
#include "arena.h"
#include "elementwise.h"
#include "gemm/gemm.h"
#include "gemm/integer.h"
#include "vectorize.h"

namespace moe_ext::cpu {

template <typename scalar_t>
class ExpertNetwork {
 public:
  using acc_t = acc_type<scalar_t>;
  static constexpr bool kSame = std::is_same_v<scalar_t, acc_t>;

  explicit ExpertNetwork(const ExpertLayers<scalar_t>& network)
      : function(network.activation, network.activation_args), network_(network) {
    for (const auto& layer : network.layers) {
      highest_rank_ = std::max(highest_rank_, layer.rank);
      has_mask_ |= layer.lora_mask != nullptr;
      widest_ = std::max({widest_, layer.fan_in, layer.columns, layer.rank});
      flops_per_row_ +=
          2 * (layer.fan_in * layer.columns + layer.rank * (layer.fan_in + layer.columns));
    }
  }

  int64_t num_experts() const { return network_.num_experts; }
  int64_t num_layers() const { return static_cast<int64_t>(network_.layers.size()); }
  const ExpertLayer<scalar_t>& layer(int64_t index) const { return network_.layers[index]; }
  int64_t fan_in(int64_t layer) const { return this->layer(layer).fan_in; }
  int64_t columns(int64_t layer) const { return this->layer(layer).columns; }
  Part all_columns(int64_t layer) const { return {0, columns(layer)}; }
  int64_t widest() const { return widest_; }
  int64_t flops_per_row() const { return flops_per_row_; }

  // Returns an expert's weight, [fan_in, columns].
  Operand<scalar_t> weight(int64_t expert, int64_t index) const {
    const auto& layer = this->layer(index);
    if (!network_.packed) return matrix_of(layer.weight, layer.fan_in, layer.columns, expert);
    return packed<scalar_t>(layer.layout, layer.panels + expert * layer.layout.bytes());
  }

  bool has_bias(int64_t layer) const { return this->layer(layer).bias != nullptr; }
  const scalar_t* bias(int64_t expert, int64_t layer) const {
    return this->layer(layer).bias + expert * columns(layer);
  }

  // The rank of the low-rank adapter of a layer, 0 if there is none.
  int64_t rank(int64_t layer) const { return this->layer(layer).rank; }
  int64_t highest_rank() const { return highest_rank_; }

  // The memory of the products with at most num_rows rows and, in backward, of the gradients of the
  // weights of an expert with at most rows_of_expert rows.
  struct Workspace {
    Workspace(Arena& arena, const ExpertNetwork& network, int64_t num_rows, int64_t rows_of_expert)
        : gemm(arena,
               {{num_rows, network.widest_, network.widest_},
                {rows_of_expert > 0 ? network.widest_ : 0, network.widest_, rows_of_expert}}),
          integers(arena.take<float>(
              network.network_.integer ? integer_workspace_size(num_rows, network.widest_) : 0)),
          lora_sums(arena.take<acc_t>(num_rows * network.highest_rank_)),
          lora_input(take_rounded(arena, num_rows * network.highest_rank_)),
          masked(arena.take<scalar_t>(network.has_mask_ ? num_rows * network.widest_ : 0)) {}

    GemmWorkspace<scalar_t> gemm;
    float* integers;
    acc_t* lora_sums;
    scalar_t* lora_input;  // scale (A a), [num_rows, rank]
    scalar_t* masked;      // A without the numbers that dropout removes

   private:
    scalar_t* take_rounded(Arena& arena, int64_t size) const {
      if constexpr (kSame) {
        return lora_sums;
      } else {
        return arena.take<scalar_t>(size);
      }
    }
  };

  // Computes some columns of in W + scale (in a) b + bias, [num_rows, columns], for the rows `in`
  // of a block. `product` is [num_rows, range.size()]. The columns of packed weights begin at a
  // multiple of kPanelOutputs. `epilogue` is that of the last GEMM.
  void linear(const Block& block, int64_t layer, Part range, const scalar_t* in, acc_t* product,
              const Workspace& workspace, const Epilogue<scalar_t>& epilogue) const {
    const int64_t num_rows = block.num_rows, width = range.size();
    Write write = Write::kReplace;
    if (has_bias(layer)) {
      const scalar_t* row = bias(block.expert, layer) + range.begin;
      for (int64_t r = 0; r < num_rows; ++r) {
        vectorized<Convert>(row, width, product + r * width);
      }
      write = Write::kAdd;
    }
    if (rank(layer) > 0) {
      compute_lora_input(block, layer, masked(block, layer, in, workspace), workspace);
      const auto input = static_cast<const scalar_t*>(workspace.lora_input);
      gemm<scalar_t>(num_rows, width, rank(layer), plain(input, rank(layer)),
                     columns_from(lora_b(block.expert, layer), range.begin), write, product,
                     workspace.gemm);
      write = Write::kAdd;
    }
    const auto w = columns_from(weight(block.expert, layer), range.begin);
    if constexpr (!std::is_same_v<scalar_t, double>) {
      if (network_.integer) {
        integer_gemm(num_rows, width, *w.layout, w.panels, in, /*add=*/write == Write::kAdd,
                     product, workspace.integers);
        if (epilogue.run) epilogue.run({0, num_rows, 0, width}, product, width);
        return;
      }
    }
    gemm<scalar_t>(num_rows, width, fan_in(layer), plain(in, fan_in(layer)), w, write, product,
                   workspace.gemm, epilogue);
  }

  // Computes dL/dA = dL/dZ W^T of a layer, [num_rows, fan_in], and the share of the adapter, whose
  // grad_lora is that of compute_lora_gradient.
  void input_gradient(const Block& block, int64_t layer, const acc_t* grad_z,
                      const acc_t* grad_lora, acc_t* grad, const Workspace& workspace,
                      const Epilogue<scalar_t>& epilogue) const {
    Write write = Write::kReplace;
    if (rank(layer) > 0) {
      gemm<scalar_t>(block.num_rows, fan_in(layer), rank(layer), plain(grad_lora, rank(layer)),
                     transpose(lora_a(block.expert, layer)), write, grad, workspace.gemm);
      if (const bool* mask = mask_of(block, layer)) {
        const auto* all = static_cast<const acc_t*>(grad);
        vectorized<Masked>(all, mask, block.num_rows * fan_in(layer), grad);
      }
      write = Write::kAdd;
    }
    gemm<scalar_t>(block.num_rows, fan_in(layer), columns(layer), plain(grad_z, columns(layer)),
                   transpose(weight(block.expert, layer)), write, grad, workspace.gemm, epilogue);
  }

  // Returns the input of a: `in` after dropout.
  const scalar_t* masked(const Block& block, int64_t layer, const scalar_t* in,
                         const Workspace& workspace) const {
    const bool* mask = mask_of(block, layer);
    if (mask == nullptr) return in;
    vectorized<Masked>(in, mask, block.num_rows * fan_in(layer), workspace.masked);
    return workspace.masked;
  }

  // Computes scale (in a), the input of b, in workspace.lora_input; `in` is after dropout.
  void compute_lora_input(const Block& block, int64_t layer, const scalar_t* in,
                          const Workspace& workspace) const {
    gemm<scalar_t>(block.num_rows, rank(layer), fan_in(layer), plain(in, fan_in(layer)),
                   lora_a(block.expert, layer), Write::kReplace, workspace.lora_sums,
                   workspace.gemm);
    const int64_t size = block.num_rows * rank(layer);
    vectorized<Scale>(lora_scale(layer), size, workspace.lora_sums);
    if constexpr (!kSame) {
      const auto* sums = static_cast<const acc_t*>(workspace.lora_sums);
      vectorized<Convert>(sums, size, workspace.lora_input);
    }
  }

  // Computes the gradient of in a, [num_rows, rank], from grad = dL/dZ.
  void compute_lora_gradient(const Block& block, int64_t layer, const acc_t* grad, acc_t* to,
                             const Workspace& workspace) const {
    gemm<scalar_t>(block.num_rows, rank(layer), columns(layer), plain(grad, columns(layer)),
                   transpose(lora_b(block.expert, layer)), Write::kReplace, to, workspace.gemm);
    vectorized<Scale>(lora_scale(layer), block.num_rows * rank(layer), to);
  }

  const ActivationFunction<scalar_t> function;

 private:
  static Operand<scalar_t> matrix_of(const ExpertMatrices<const scalar_t>& matrices, int64_t rows,
                                     int64_t columns, int64_t expert) {
    const scalar_t* data = matrices.data + expert * rows * columns;
    return matrices.transposed ? transposed(data, rows) : plain(data, columns);
  }

  // Returns the mask of the rows of a block, or null.
  const bool* mask_of(const Block& block, int64_t index) const {
    const bool* mask = layer(index).lora_mask;
    return mask == nullptr ? nullptr : mask + block.first_row * fan_in(index);
  }

  acc_t lora_scale(int64_t index) const { return static_cast<acc_t>(layer(index).lora_scale); }
  Operand<scalar_t> lora_a(int64_t expert, int64_t index) const {
    return matrix_of(layer(index).lora_a, fan_in(index), rank(index), expert);
  }
  Operand<scalar_t> lora_b(int64_t expert, int64_t index) const {
    return matrix_of(layer(index).lora_b, rank(index), columns(index), expert);
  }

  const ExpertLayers<scalar_t>& network_;
  bool has_mask_ = false;
  int64_t widest_ = 0, highest_rank_ = 0, flops_per_row_ = 0;
};

}  // namespace moe_ext::cpu
