// The backward pass of a block of an expert.
//
// A layer computes Z = A W + b; the activation of Z is the input A of the next layer. With P =
// dL/dA of the last layer before the gates are applied:
//   dG = <P, A> + <dy, b>. This does not need the expert's output, so it is not saved.
//   dW = A^T dZ, db = sum of the rows of dZ, dA = dZ W^T, dZ' = dA * activation'(Z').
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "backward_schedule.h"
#include "elementwise.h"
#include "expert_activations.h"
#include "expert_network.h"
#include "expert_rows.h"
#include "parameter_gradients.h"
#include "vectorize.h"

namespace moe_ext::cpu {

// The layers of ParameterGradients: those of the network and then, if it has adapters, the first
// and the second matrices of the adapters.
template <typename scalar_t>
class LearnedLayers {
 public:
  using Layer = typename ParameterGradients<scalar_t>::Layer;

  explicit LearnedLayers(const ExpertNetwork<scalar_t>& network) : network_(network) {}

  int64_t lora_a(int64_t l) const { return network_.num_layers() + l; }
  int64_t lora_b(int64_t l) const { return 2 * network_.num_layers() + l; }

  // Returns the layers, with their gradients.
  std::vector<Layer> with_gradients(
      std::span<const ExpertLayerGradients<scalar_t>> gradients) const {
    const int64_t num_layers = network_.num_layers();
    const bool has_lora = network_.highest_rank() > 0;
    std::vector<Layer> layers(has_lora ? 3 * num_layers : num_layers);
    for (int64_t l = 0; l < num_layers; ++l) {
      const int64_t fan_in = network_.fan_in(l), columns = network_.columns(l);
      const auto& [weight, bias, a, b] = gradients[l];
      const auto& layer = network_.layer(l);
      layers[l] = {fan_in, columns, layer.weight.transposed, weight, bias};
      if (!has_lora) continue;
      layers[lora_a(l)] = {fan_in, layer.rank, layer.lora_a.transposed, a};
      layers[lora_b(l)] = {layer.rank, columns, layer.lora_b.transposed, b};
    }
    return layers;
  }

 private:
  const ExpertNetwork<scalar_t>& network_;
};

// The inputs and the outputs that the backward passes of all blocks share.
template <typename scalar_t>
struct Gradients {
  using acc_t = acc_type<scalar_t>;

  const ExpertNetwork<scalar_t>& network;
  const ExpertRows<scalar_t>& rows;
  const std::span<scalar_t* const> hidden;  // z of each hidden layer, if saved for backward
  const scalar_t* const grad_out;           // gradient of y, or of the output rows without gates
  const acc_t* const gates;                 // for each slot, or null
  acc_t* const grad_gates;
  scalar_t* const grad_rows;  // for the input rows, or null
  const ParameterGradients<scalar_t>& parameters;
  const int64_t first_learned;  // the first layer with a gradient of parameters
};

// The backward pass of a block, from the last layer to the first.
template <typename scalar_t>
class BlockBackward {
 public:
  using acc_t = acc_type<scalar_t>;

  // The memory of a thread. An array of rows that is not needed has no elements.
  struct Workspace {
    Workspace(Arena& arena, const Gradients<scalar_t>& gradients)
        : products(arena, gradients.network, gradients.rows.most_in_block(),
                   gradients.rows.most_of_expert()),
          activations(arena, gradients.network, gradients.rows,
                      /*keeps_z=*/gradients.hidden.empty()),
          parameters(arena, products.gemm, gradients.network.widest()) {
      const auto& network = gradients.network;
      const int64_t num_layers = network.num_layers();
      const bool has_gates = gradients.gates != nullptr;
      int64_t width_a = kSame && gradients.grad_rows != nullptr ? 0 : network.fan_in(0);
      int64_t widths_z[2] = {0, 0};
      for (int64_t l = 1; l < num_layers; ++l) {
        const int64_t width = network.fan_in(l), width_z = network.columns(l - 1);
        if (width_z != width) width_a = std::max(width_a, width);
        widths_z[l % 2] = std::max(widths_z[l % 2], width_z);
      }
      const auto rows = [&](int64_t width) {
        return arena.take<acc_t>(gradients.rows.most_in_block() * width);
      };
      grad_out = rows(network.columns(num_layers - 1));
      grad_a = rows(width_a);
      grad_z = {rows(widths_z[0]), rows(widths_z[1])};
      gate = rows(has_gates ? 1 : 0);
      grad_gate = rows(has_gates ? kLanes : 0);
      grad_lora = rows(network.highest_rank());
    }

    typename ExpertNetwork<scalar_t>::Workspace products;
    Activations<scalar_t> activations;
    typename ParameterGradients<scalar_t>::Workspace parameters;
    acc_t* grad_out;               // dL/dy; gate_gradient multiplies it by the gates
    acc_t* grad_a;                 // dL/dA, if it cannot use the memory of dL/dZ
    std::array<acc_t*, 2> grad_z;  // dL/dZ of a layer and of the layer before it
    acc_t* gate;                   // for each row
    acc_t* grad_gate;              // kLanes partial sums for each row
    acc_t* grad_lora;              // the gradient of the rows between the matrices of an adapter
  };

  // `split` is the block's expert if that has several blocks, else null.
  BlockBackward(const Gradients<scalar_t>& gradients, const Block& block, const SplitExpert* split,
                const Workspace& workspace)
      : gradients_(gradients),
        network_(gradients.network),
        rows_(gradients.rows),
        block_(block),
        split_(split),
        space_(workspace),
        a_(workspace.activations) {
    a_.take_rows(block, network_, rows_, gradients.hidden);
    if (gradients.hidden.empty()) {
      a_.compute_hidden(block, network_, space_.products, space_.grad_z);
    }
  }

  void run() const {
    take_output_gradient();
    const acc_t* grad_z = space_.grad_out;
    for (int64_t l = last_; l >= 0; --l) {
      const bool needs_rest = gradients_.grad_rows != nullptr || l > gradients_.first_learned;
      const bool needs_gates = l == last_ && has_gates();
      const acc_t* grad_before = nullptr;
      if (network_.rank(l) > 0) {
        network_.compute_lora_gradient(block_, l, grad_z, space_.grad_lora, space_.products);
      }
      if (needs_rest || needs_gates) {
        grad_before = input_gradient(l, grad_z);
      } else if (!has_input(l) && needs_input(l)) {
        activate_input(l);
      }
      if (needs_gates) gate_gradient();
      gradients_.parameters.add(block_, split_, l, a_.input(l), grad_z, space_.parameters);
      if (network_.rank(l) > 0) add_lora_gradients(l, grad_z);
      if (!needs_rest) return;
      grad_z = grad_before;
    }
  }

 private:
  static constexpr bool kSame = ExpertNetwork<scalar_t>::kSame;

  bool has_gates() const { return gradients_.gates != nullptr; }

  // Loads the gates and dL/dy for the block's rows; dL/dy is not multiplied by the gates yet.
  void take_output_gradient() const {
    rows_.copy(block_, gradients_.grad_out, has_gates(), network_.columns(last_), space_.grad_out);
    if (!has_gates()) return;
    for (int64_t r = 0; r < block_.num_rows; ++r) {
      space_.gate[r] = gradients_.gates[rows_.slot_of(block_.first_row + r)];
    }
    std::fill_n(space_.grad_gate, block_.num_rows * kLanes, acc_t(0));
  }

  // Returns whether computing z also computed the input of layer l. In half precision, the
  // activations are always computed from the rounded z, saved or recomputed.
  bool has_input(int64_t l) const { return l == 0 || (kSame && gradients_.hidden.empty()); }

  // Returns whether a gradient of the parameters of layer l needs the input of the layer.
  bool needs_input(int64_t l) const {
    const auto& parameters = gradients_.parameters;
    return parameters.needs_weight(l) ||
           (network_.rank(l) > 0 && (parameters.needs_weight(layers_.lora_a(l)) ||
                                     parameters.needs_weight(layers_.lora_b(l))));
  }

  void add_lora_gradients(int64_t l, const acc_t* grad_z) const {
    const auto& parameters = gradients_.parameters;
    const int64_t lora_a = layers_.lora_a(l), lora_b = layers_.lora_b(l);
    const bool needs_b = parameters.needs_weight(lora_b);
    if (!needs_b && !parameters.needs_weight(lora_a)) return;
    const scalar_t* input = network_.masked(block_, l, a_.input(l), space_.products);
    parameters.add(block_, split_, lora_a, input, space_.grad_lora, space_.parameters);
    if (!needs_b) return;
    network_.compute_lora_input(block_, l, input, space_.products);
    parameters.add(block_, split_, lora_b, space_.products.lora_input, grad_z, space_.parameters);
  }

  // Computes the input of layer l, a hidden layer's activations.
  void activate_input(int64_t l) const {
    const Region all{
        .row = 0, .num_rows = block_.num_rows, .column = 0, .num_columns = network_.columns(l - 1)};
    network_.function.activate(a_.z[l - 1], all, network_.fan_in(l), a_.out[l - 1]);
  }

  // Takes dL/dZ of layer l, [num_rows, columns]. At l = 0, writes dL/dx. Otherwise returns dL/dZ'
  // of layer l - 1 and computes that layer's activations, unless recomputing z already did. At the
  // last layer, dL/dZ is not multiplied by the gates yet.
  const acc_t* input_gradient(int64_t l, const acc_t* grad_z) const {
    const int64_t width = network_.fan_in(l);
    const int64_t width_z = l > 0 ? network_.columns(l - 1) : width;
    const scalar_t* z = l > 0 ? a_.z[l - 1] : nullptr;
    const bool gated_sum = l == last_ && has_gates();
    const bool activated = has_input(l);
    scalar_t* grad_rows = nullptr;
    if (l == 0 && gradients_.grad_rows != nullptr) {
      grad_rows = gradients_.grad_rows + block_.first_row * width;
    }
    acc_t* grad_before = space_.grad_z[l % 2];
    acc_t* grad_a = l > 0 && width_z == width ? grad_before : space_.grad_a;
    if constexpr (kSame) {
      if (grad_rows != nullptr) grad_a = grad_rows;
    }
    const auto in_z = [&](Region region) {  // the columns of z that complete the activations
      if (network_.function.interleaved) {
        region.column *= 2;
        region.num_columns *= 2;
      } else {
        region.column += width_z - width;  // the second half of a gated z
      }
      return region;
    };
    const auto prefetch = [&](const Region& region) {
      fetch(z, in_z(region), width_z);
      if (width_z != width && !network_.function.interleaved) fetch(z, region, width_z);
    };
    const auto run = [&](const Region& region, acc_t* sums, int64_t ld) {
      if (!activated) network_.function.activate(z, in_z(region), width, a_.out[l - 1]);
      if (gated_sum) {
        vectorized<DotRegion>(static_cast<const acc_t*>(sums), ld, a_.input(l), region, width,
                              space_.grad_gate);
        vectorized<ScaleRegion>(static_cast<const acc_t*>(space_.gate), region, ld, sums);
      }
      if (l > 0) {
        network_.function.activate_backward(z, sums, ld, region, width, grad_before);
      } else if (!kSame && grad_rows != nullptr) {
        vectorized<ConvertRegion>(static_cast<const acc_t*>(sums), ld, region, width, grad_rows);
      }
    };
    Epilogue<scalar_t> epilogue{.run = run};
    if (l > 0) {
      epilogue.prefetch = prefetch;
      epilogue.next_b = transpose(network_.weight(block_.expert, l - 1));
    } else if (const Block* next = rows_.after(block_)) {
      epilogue.next_b = transpose(network_.weight(next->expert, last_));
    }
    network_.input_gradient(block_, l, grad_z, space_.grad_lora, grad_a, space_.products, epilogue);
    return grad_before;
  }

  // Finishes the gradients of the gates, then multiplies dL/dy by the gates.
  void gate_gradient() const {
    const int64_t columns = network_.columns(last_);
    for (int64_t r = 0; r < block_.num_rows; ++r) {
      acc_t* grad_gate = gradients_.grad_gates + rows_.slot_of(block_.first_row + r);
      acc_t* dy = space_.grad_out + r * columns;
      vectorized<SumOfLanes>(space_.grad_gate + r * kLanes, grad_gate);
      if (network_.has_bias(last_)) {
        acc_t of_bias;
        vectorized<Dot>(static_cast<const acc_t*>(dy), network_.bias(block_.expert, last_), columns,
                        &of_bias);
        *grad_gate += of_bias;
      }
      vectorized<Scale>(space_.gate[r], columns, dy);
      const int64_t rank = network_.rank(last_);
      vectorized<Scale>(space_.gate[r], rank, space_.grad_lora + r * rank);
    }
  }

  // Prefetches a region of z.
  static void fetch(const scalar_t* z, const Region& region, int64_t width) {
    constexpr int64_t kLine = 64 / sizeof(scalar_t);
    for (int64_t r = region.row; r < region.row + region.num_rows; ++r) {
      for (int64_t i = 0; i < region.num_columns; i += kLine) {
        __builtin_prefetch(z + r * width + region.column + i);
      }
    }
  }

  const Gradients<scalar_t>& gradients_;
  const ExpertNetwork<scalar_t>& network_;
  const LearnedLayers<scalar_t> layers_{network_};
  const ExpertRows<scalar_t>& rows_;
  const Block& block_;
  const SplitExpert* split_;
  const int64_t last_ = network_.num_layers() - 1;
  const Workspace& space_;
  Activations<scalar_t> a_;
};

}  // namespace moe_ext::cpu
