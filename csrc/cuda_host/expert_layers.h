// The layers of the experts on CUDA: the GEMMs, and the kernels that read and write their matrices.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "../experts.h"
#include "grouped_gemm.h"

namespace moe_ext {

// The layers and the rows. Backward goes through the layers from the last to the first.
class CudaExperts {
 public:
  CudaExperts(const char* op, const Tensor& x, const Routing& routing, const FeedForward& network)
      : network_(network),
        source_(op, x, routing, Cuda::kReadsValues),
        has_slots_(routing.inverse.has_value()),
        gemms_(x, source_.offsets(), source_.num_rows(), network.weights[0].size(0)) {
    const auto layouts = packed_layouts(network, x.size(1));
    for (size_t l = 0; l < network.weights.size(); ++l) {
      const Tensor& weight = network.weights[l];
      weights_.push_back(layouts.empty() ? in_known_layout(weight)
                                         : unpacked(weight, layouts[l], x.options()));
    }
    for (const Tensor& bias : network.biases) biases_.push_back(readable_bias(bias));
    for (const Tensor& a : network.lora.a) lora_a_.push_back(readable_lora(a));
    for (const Tensor& b : network.lora.b) lora_b_.push_back(readable_lora(b));
  }

  const Slots& slots() const { return source_.slots(); }
  // Returns the input rows of the first layer, computed at the first use.
  const Tensor& input() const {
    if (!input_.defined()) input_ = has_slots_ ? rows_of(source_.x()) : source_.x();
    return input_;
  }
  int64_t num_layers() const { return static_cast<int64_t>(weights_.size()); }

  // Returns the tokens' rows; both tensors are contiguous.
  Tensor rows_of(const Tensor& tokens) const {
    Tensor rows = at::empty({source_.num_rows(), tokens.size(1)}, tokens.options());
    with_type(tokens, [&]<typename scalar_t>() {
      Cuda::run(RowsOfSlots<scalar_t>{.x = tokens.const_data_ptr<scalar_t>(),
                                      .slots = slots(),
                                      .width = tokens.size(1),
                                      .rows = rows.mutable_data_ptr<scalar_t>()});
    });
    return rows;
  }

  bool has_bias() const { return !biases_.empty(); }
  const Tensor& weight(int64_t layer) const { return weights_[layer]; }
  Tensor bias(int64_t layer) const { return has_bias() ? biases_[layer] : Tensor(); }

  // Returns the output Z of a layer, without the bias.
  Tensor linear(int64_t layer, const Tensor& in) const {
    const Tensor z = gemms_.times(in, weight(layer));
    if (has_lora(layer)) z.add_(gemms_.times(lora_input(layer, in), lora_b(layer)));
    return z;
  }

  // Returns dL/dA of a layer with grad = dL/dZ.
  Tensor input_gradient(int64_t layer, const Tensor& grad) const {
    const Tensor gradient = gemms_.times(grad, weight(layer).mT());
    if (has_lora(layer)) {
      const Tensor share = gemms_.times(lora_gradient(layer, grad), lora_a(layer).mT());
      gradient.add_(masked(layer, share));
    }
    return gradient;
  }

  // The low-rank adapter of a layer; see LoraLayers.
  bool has_lora(int64_t layer) const { return !lora_a_.empty() && lora_a_[layer].numel() > 0; }
  const Tensor& lora_a(int64_t layer) const { return lora_a_[layer]; }
  const Tensor& lora_b(int64_t layer) const { return lora_b_[layer]; }
  // Returns the input of a: `in` after dropout.
  Tensor masked(int64_t layer, const Tensor& in) const {
    if (!has_mask(network_.lora, layer)) return in;
    return in.masked_fill(network_.lora.masks[layer].logical_not(), 0);
  }
  // scale A a, the input of b, [R, rank]
  Tensor lora_input(int64_t layer, const Tensor& in) const {
    return gemms_.times(masked(layer, in), lora_a(layer)).mul_(network_.lora.scales[layer]);
  }
  // dL/d(A a), [R, rank]
  Tensor lora_gradient(int64_t layer, const Tensor& grad) const {
    return gemms_.times(grad, lora_b(layer).mT()).mul_(network_.lora.scales[layer]);
  }

  // Returns the gradient of a matrix with the input a and grad, the gradient of its output, in the
  // memory layout of the matrix.
  Tensor matrix_gradient(const Tensor& matrix, const Tensor& a, const Tensor& grad) const {
    return is_transposed(matrix) ? gemms_.weight_gradient(grad, a).mT()
                                 : gemms_.weight_gradient(a, grad);
  }

  // Returns the input of the layer after `layer`, whose output is z.
  Tensor next_input(int64_t layer, const Tensor& z) const {
    return activated(network_.activation, layer, z, weight(layer + 1).size(1));
  }

  // Returns the outputs of all layers but the last: hidden or, if it is empty, recomputed.
  std::vector<Tensor> outputs(at::TensorList hidden) const {
    std::vector<Tensor> zs;
    for (int64_t l = 0; l + 1 < num_layers(); ++l) {
      if (hidden.empty()) {
        zs.push_back(linear(l, l == 0 ? input() : next_input(l - 1, zs.back())));
      } else {
        zs.push_back(hidden[l].contiguous());
      }
    }
    return zs;
  }

  // Returns the rows of the last layer with its bias.
  Tensor with_bias(const Tensor& rows) const {
    if (!has_bias()) return rows;
    return activated("identity", num_layers() - 1, rows, rows.size(1));
  }

  // Computes y [T, columns] from the rows of the last layer.
  void combine(const Tensor& rows, const Tensor& gates, const Tensor& y) const {
    const Tensor weights = gates.contiguous();
    with_type(rows, [&]<typename scalar_t>() {
      Cuda::run(SumWithBias<scalar_t>{.rows = rows.const_data_ptr<scalar_t>(),
                                      .bias = data_of<scalar_t>(bias(num_layers() - 1)),
                                      .experts = gemms_.experts(),
                                      .gates = weights.const_data_ptr<acc_type<scalar_t>>(),
                                      .slots = slots(),
                                      .width = rows.size(1),
                                      .sums = y.mutable_data_ptr<scalar_t>()});
    });
  }

  // The gates in backward.
  struct Gates {
    Tensor values, gradient;  // of each slot, in the type of sums
    Tensor dy;                // [T, columns]
    Tensor row_gates;         // [R]
    bool multiply_a;          // see GatesBackward

    template <typename scalar_t>
    GatesBackward<scalar_t> arguments(const Slots& slots, const Tensor& last_bias) const {
      using acc_t = acc_type<scalar_t>;
      return {.slots = slots,
              .gates = values.const_data_ptr<acc_t>(),
              .dy = dy.const_data_ptr<scalar_t>(),
              .bias = data_of<scalar_t>(last_bias),
              .columns = dy.size(1),
              .multiplies_a = multiply_a,
              .grad_gates = gradient.mutable_data_ptr<acc_t>(),
              .row_gates = row_gates.mutable_data_ptr<acc_t>()};
    }
  };

  // The input a of a layer, and the gradient of the output of the layer before it; for the first
  // layer, the gradient of the rows. They are undefined where they are not needed.
  struct InputBackward {
    Tensor a, grad;
  };

  // Computes them from the gradient `grad` of the layer's output. zs are the outputs of all layers
  // but the last. The gates are those of the last layer, without which grad was computed, or null.
  InputBackward backward(int64_t layer, at::TensorList zs, const Tensor& grad, const Gates* gates,
                         bool needs_a, bool needs_grad) const {
    Tensor p;
    if (needs_grad || gates != nullptr) p = input_gradient(layer, grad);
    if (layer == 0 && gates == nullptr) return {needs_a ? input() : Tensor(), p};
    if (!p.defined()) return {needs_a ? next_input(layer - 1, zs[layer - 1]) : Tensor(), p};
    // The input of a single layer is its own activation: the identity.
    const Tensor& z = layer == 0 ? input() : zs[layer - 1];
    const Tensor z_bias = layer == 0 ? Tensor() : bias(layer - 1);
    const InputBackward results{needs_a ? at::empty(p.sizes(), p.options()) : Tensor(),
                                needs_grad ? at::empty(z.sizes(), z.options()) : Tensor()};
    with_type(p, [&]<typename scalar_t>() {
      const auto data = [](const Tensor& result) {
        return result.defined() ? result.mutable_data_ptr<scalar_t>() : nullptr;
      };
      GatesBackward<scalar_t> gate_arguments{};
      if (gates != nullptr) {
        gate_arguments = gates->arguments<scalar_t>(slots(), bias(num_layers() - 1));
      }
      Cuda::run(
          ActivateBackward<scalar_t>{.activation = layer == 0 ? "identity" : network_.activation,
                                     .activation_args = activation_args(),
                                     .z = z.const_data_ptr<scalar_t>(),
                                     .bias = data_of<scalar_t>(z_bias),
                                     .p = p.const_data_ptr<scalar_t>(),
                                     .experts = gemms_.experts(),
                                     .width = p.size(1),
                                     .gates = gate_arguments,
                                     .a = data(results.a),
                                     .grad_z = data(results.grad)});
    });
    return results;
  }

  // Returns the sum of each expert's rows, [E, columns]. The rows may have weights, [R].
  Tensor sum_by_expert(const Tensor& rows, const Tensor& weights) const {
    Tensor sums = at::empty({gemms_.experts().num_groups, rows.size(1)},
                            rows.options().dtype(accumulate_type(rows)));
    with_type(rows, [&]<typename scalar_t>() {
      using acc_t = acc_type<scalar_t>;
      Cuda::run(SumByExpert<scalar_t>{.rows = rows.const_data_ptr<scalar_t>(),
                                      .weights = data_of<acc_t>(weights),
                                      .experts = gemms_.experts(),
                                      .columns = rows.size(1),
                                      .sums = sums.mutable_data_ptr<acc_t>()});
    });
    return sums.to(rows.scalar_type());
  }

 private:
  std::span<const double> activation_args() const {
    return {network_.activation_args.data(), network_.activation_args.size()};
  }

  // Returns activation(z + bias), [R, width].
  Tensor activated(std::string_view activation, int64_t layer, const Tensor& z,
                   int64_t width) const {
    Tensor out = at::empty({z.size(0), width}, z.options());
    with_type(z, [&]<typename scalar_t>() {
      Cuda::run(Activate<scalar_t>{.activation = activation,
                                   .activation_args = activation_args(),
                                   .z = z.const_data_ptr<scalar_t>(),
                                   .bias = data_of<scalar_t>(bias(layer)),
                                   .experts = gemms_.experts(),
                                   .width = width,
                                   .out = out.mutable_data_ptr<scalar_t>()});
    });
    return out;
  }

  // Returns the weight of packed panels [E, panels, bytes] as [E, inputs, outputs].
  static Tensor unpacked(const Tensor& panels, const PackedLayout& layout,
                         const at::TensorOptions& options) {
    const Tensor source = panels.contiguous();
    Tensor weight = at::empty({panels.size(0), layout.inputs, layout.outputs}, options);
    with_type(weight, [&]<typename scalar_t>() {
      Cuda::run(UnpackedWeight<scalar_t>{.panels = source.const_data_ptr<uint8_t>(),
                                         .layout = layout,
                                         .num_experts = panels.size(0),
                                         .weight = weight.mutable_data_ptr<scalar_t>()});
    });
    return weight;
  }

  const FeedForward& network_;
  InputTensors source_;
  bool has_slots_;
  GroupedGemms gemms_;
  mutable Tensor input_;
  std::vector<Tensor> weights_, biases_, lora_a_, lora_b_;
};

}  // namespace moe_ext
