// The layers of the experts' networks, and their products with the rows of a block.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <vector>

#include "../experts.h"
#include "arena.h"
#include "elementwise.h"
#include "gemm/gemm.h"
#include "gemm/integer.h"
#include "vectorize.h"

namespace moe_ext::cpu {

template <typename scalar_t>
class ExpertNetwork {
 public:
  using acc_t = at::opmath_type<scalar_t>;
  static constexpr bool kSame = std::is_same_v<scalar_t, acc_t>;

  // `fan_in` is that of the first layer.
  ExpertNetwork(const FeedForward& network, int64_t fan_in)
      : layouts_(packed_layouts(network, fan_in)),
        integer_(network.packed && network.packed->is_integer()) {
    math::with_activation(network.activation, network.activation_args, [&](auto function) {
      interleaved = function.kInterleaved;
      const auto values = [function](const auto* z, Region region, int64_t width, scalar_t* out) {
        vectorized<Activate>(function, z, region, width, out);
      };
      activate = values;
      activate_rounded = values;
      activate_backward = [function](const scalar_t* z, const acc_t* grad, Region region,
                                     int64_t width, acc_t* grad_z) {
        vectorized<ActivateBackward>(function, z, grad, region, width, grad_z);
      };
    });
    for (const Tensor& weight : network.weights) {
      weights_.push_back(layouts_.empty() ? in_known_layout(weight) : weight.contiguous());
      transposed_.push_back(layouts_.empty() && moe_ext::is_transposed(weight));
    }
    for (const Tensor& bias : network.biases) biases_.push_back(readable_bias(bias));
    for (size_t l = 0; l < network.lora.a.size(); ++l) {
      lora_.push_back(
          {.a = readable_lora(network.lora.a[l]),
           .b = readable_lora(network.lora.b[l]),
           .mask = has_mask(network.lora, l) ? network.lora.masks[l].contiguous() : Tensor(),
           .scale = static_cast<acc_t>(network.lora.scales[l])});
    }
    for (int64_t l = 0; l < num_layers(); ++l) {
      const int64_t in = this->fan_in(l), out = columns(l);
      highest_rank_ = std::max(highest_rank_, rank(l));
      has_mask_ |= has_lora() && lora_[l].mask.defined();
      widest_ = std::max({widest_, in, out, rank(l)});
      flops_per_row_ += 2 * (in * out + rank(l) * (in + out));
    }
  }

  int64_t num_experts() const { return weights_[0].size(0); }
  int64_t num_layers() const { return static_cast<int64_t>(weights_.size()); }
  int64_t fan_in(int64_t layer) const {
    return layouts_.empty() ? weights_[layer].size(1) : layouts_[layer].inputs;
  }
  int64_t columns(int64_t layer) const {
    return layouts_.empty() ? weights_[layer].size(2) : layouts_[layer].outputs;
  }
  int64_t widest() const { return widest_; }
  int64_t flops_per_row() const { return flops_per_row_; }

  // Returns whether the weights of a layer are stored as [columns, fan_in].
  bool is_transposed(int64_t layer) const { return transposed_[layer]; }

  // Returns an expert's weight, [fan_in, columns].
  Operand<scalar_t> weight(int64_t expert, int64_t layer) const {
    if (layouts_.empty()) return matrix_of(weights_[layer], transposed_[layer], expert);
    const PackedLayout& layout = layouts_[layer];
    const auto* panels = weights_[layer].template const_data_ptr<uint8_t>();
    return packed<scalar_t>(layout, panels + expert * layout.bytes());
  }

  bool has_bias() const { return !biases_.empty(); }
  const scalar_t* bias(int64_t expert, int64_t layer) const {
    return biases_[layer].template const_data_ptr<scalar_t>() + expert * columns(layer);
  }

  // The low-rank adapter of a layer (see LoraLayers), of rank 0 if there is none.
  bool has_lora() const { return !lora_.empty(); }
  int64_t rank(int64_t layer) const {
    return has_lora() && lora_[layer].a.dim() == 3 ? lora_[layer].a.size(2) : 0;
  }
  int64_t highest_rank() const { return highest_rank_; }
  bool is_lora_a_transposed(int64_t layer) const { return moe_ext::is_transposed(lora_[layer].a); }
  bool is_lora_b_transposed(int64_t layer) const { return moe_ext::is_transposed(lora_[layer].b); }

  // The memory of the products with at most num_rows rows and, in backward, of the gradients of the
  // weights of an expert with at most rows_of_expert rows.
  struct Workspace {
    Workspace(Arena& arena, const ExpertNetwork& network, int64_t num_rows, int64_t rows_of_expert)
        : gemm(arena,
               {{num_rows, network.widest_, network.widest_},
                {rows_of_expert > 0 ? network.widest_ : 0, network.widest_, rows_of_expert}}),
          integers(arena.take<float>(
              network.integer_ ? integer_workspace_size(num_rows, network.widest_) : 0)),
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

  // Computes product = in W + scale (in a) b + bias, [num_rows, columns], for the rows `in` of a
  // block. `epilogue` is that of the last GEMM.
  void linear(const Block& block, int64_t layer, const scalar_t* in, acc_t* product,
              const Workspace& workspace, const Epilogue<scalar_t>& epilogue) const {
    const int64_t num_rows = block.num_rows, width = columns(layer);
    Write write = Write::kReplace;
    if (has_bias()) {
      for (int64_t r = 0; r < num_rows; ++r) {
        vectorized<Convert>(bias(block.expert, layer), width, product + r * width);
      }
      write = Write::kAdd;
    }
    if (rank(layer) > 0) {
      compute_lora_input(block, layer, masked(block, layer, in, workspace), workspace);
      const auto input = static_cast<const scalar_t*>(workspace.lora_input);
      gemm<scalar_t>(num_rows, width, rank(layer), plain(input, rank(layer)),
                     lora_b(block.expert, layer), write, product, workspace.gemm);
      write = Write::kAdd;
    }
    if constexpr (!std::is_same_v<scalar_t, double>) {
      if (integer_) {
        integer_gemm(num_rows, layouts_[layer], weight(block.expert, layer).panels, in,
                     /*add=*/write == Write::kAdd, product, workspace.integers);
        if (epilogue.run) epilogue.run({0, num_rows, 0, width});
        return;
      }
    }
    gemm<scalar_t>(num_rows, width, fan_in(layer), plain(in, fan_in(layer)),
                   weight(block.expert, layer), write, product, workspace.gemm, epilogue);
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
    vectorized<Scale>(lora_[layer].scale, size, workspace.lora_sums);
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
    vectorized<Scale>(lora_[layer].scale, block.num_rows * rank(layer), to);
  }

  // Activate and ActivateBackward for the activation in use.
  std::function<void(const acc_t* z, Region region, int64_t width, scalar_t* out)> activate;
  std::function<void(const scalar_t* z, Region region, int64_t width, scalar_t* out)>
      activate_rounded;
  std::function<void(const scalar_t* z, const acc_t* grad, Region region, int64_t width,
                     acc_t* grad_z)>
      activate_backward;
  bool interleaved = false;  // see math/activation.h

 private:
  struct Lora {
    Tensor a, b, mask;
    acc_t scale;
  };

  static Operand<scalar_t> matrix_of(const Tensor& matrices, bool is_transposed, int64_t expert) {
    const int64_t rows = matrices.size(1), columns = matrices.size(2);
    const scalar_t* data = matrices.template const_data_ptr<scalar_t>() + expert * rows * columns;
    return is_transposed ? transposed(data, rows) : plain(data, columns);
  }
  // Returns the mask of the rows of a block, or null.
  const bool* mask_of(const Block& block, int64_t layer) const {
    const Tensor& mask = lora_[layer].mask;
    if (!mask.defined()) return nullptr;
    return mask.template const_data_ptr<bool>() + block.first_row * fan_in(layer);
  }

  Operand<scalar_t> lora_a(int64_t expert, int64_t layer) const {
    return matrix_of(lora_[layer].a, is_lora_a_transposed(layer), expert);
  }
  Operand<scalar_t> lora_b(int64_t expert, int64_t layer) const {
    return matrix_of(lora_[layer].b, is_lora_b_transposed(layer), expert);
  }

  std::vector<PackedLayout> layouts_;  // of packed weights
  const bool integer_;                 // whether the arithmetic is that of integers
  std::vector<Tensor> weights_, biases_;
  std::vector<bool> transposed_;  // of each layer
  std::vector<Lora> lora_;        // of each layer, or empty
  bool has_mask_ = false;
  int64_t widest_ = 0, highest_rank_ = 0, flops_per_row_ = 0;
};

}  // namespace moe_ext::cpu
