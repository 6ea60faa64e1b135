// The experts on CUDA: gather of the tokens, feed-forward networks, gated sum (Eq. 1).
//
// A layer of an expert computes Z = A W + b; the activation of Z is the input A of the next layer.
// Backward, with P = dL/dA of the last layer before the gates are applied:
//   dG = <P, A> + <dy, b>. This does not need the expert's output, so it is not saved.
//   dW = A^T dZ, db = sum of the rows of dZ, dA = dZ W^T, dZ' = dA * activation'(Z').
// In the last layer dZ = g dy: dG is computed first, then P and dy are multiplied by the gate g.
#include "../experts.h"

#include <vector>

#include "../implement.h"
#include "grouped_gemm.h"

namespace moe_ext {
namespace {

// State that forward and backward share: the layers and the rows.
class Experts {
 public:
  Experts(const char* op, const Tensor& x, const Routing& routing, const FeedForward& network)
      : network_(network),
        source_(op, x, routing, Cuda::kReadsValues),
        gemms_(source_.offsets(), source_.num_rows(), network.weights[0].size(0)),
        input_(routing.inverse ? rows_of(source_.x()) : source_.x()) {
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
  const Tensor& input() const { return input_; }
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

  Tensor linear(int64_t layer, const Tensor& in) const {
    const Tensor z = gemms_.times(in, weight(layer), bias(layer));
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

  // Returns the input of the layer after `layer`, whose pre-activations are z.
  Tensor next_input(int64_t layer, const Tensor& z) const {
    Tensor out = at::empty({z.size(0), weight(layer + 1).size(1)}, z.options());
    with_type(z, [&]<typename scalar_t>() {
      Cuda::run(Activate<scalar_t>{.activation = network_.activation,
                                   .activation_args = activation_args(),
                                   .z = z.const_data_ptr<scalar_t>(),
                                   .num_rows = out.size(0),
                                   .width = out.size(1),
                                   .out = out.mutable_data_ptr<scalar_t>()});
    });
    return out;
  }

  Tensor activate_backward(const Tensor& z, const Tensor& grad) const {
    Tensor grad_z = at::empty(z.sizes(), z.options());
    with_type(z, [&]<typename scalar_t>() {
      Cuda::run(ActivateBackward<scalar_t>{.activation = network_.activation,
                                           .activation_args = activation_args(),
                                           .z = z.const_data_ptr<scalar_t>(),
                                           .grad = grad.const_data_ptr<scalar_t>(),
                                           .num_rows = grad.size(0),
                                           .width = grad.size(1),
                                           .grad_z = grad_z.mutable_data_ptr<scalar_t>()});
    });
    return grad_z;
  }

  // Writes the gradients of the gates; then multiplies p and dy by the gates, in place. The last
  // layer has the input a and p = dL/dA; dy [R, columns] is dL/dy of the rows.
  void gate_backward(const Tensor& p, const Tensor& a, const Tensor& dy, const Tensor& gates,
                     const Tensor& grad_gates) const {
    const Tensor last_bias = bias(num_layers() - 1);
    with_type(p, [&]<typename scalar_t>() {
      using acc_t = acc_type<scalar_t>;
      Cuda::run(GateBackward<scalar_t>{.p = p.mutable_data_ptr<scalar_t>(),
                                       .a = a.const_data_ptr<scalar_t>(),
                                       .dy = dy.mutable_data_ptr<scalar_t>(),
                                       .bias = data_of<scalar_t>(last_bias),
                                       .experts = gemms_.experts(),
                                       .slots = slots(),
                                       .gates = gates.const_data_ptr<acc_t>(),
                                       .fan_in = p.size(1),
                                       .columns = dy.size(1),
                                       .grad_gates = grad_gates.mutable_data_ptr<acc_t>()});
    });
  }

  // Returns the sum of each expert's rows, [E, columns].
  Tensor sum_by_expert(const Tensor& rows) const {
    Tensor sums = at::empty({gemms_.experts().num_groups, rows.size(1)},
                            rows.options().dtype(accumulate_type(rows)));
    with_type(rows, [&]<typename scalar_t>() {
      Cuda::run(SumByExpert<scalar_t>{.rows = rows.const_data_ptr<scalar_t>(),
                                      .experts = gemms_.experts(),
                                      .columns = rows.size(1),
                                      .sums = sums.mutable_data_ptr<acc_type<scalar_t>>()});
    });
    return sums.to(rows.scalar_type());
  }

 private:
  std::span<const double> activation_args() const {
    return {network_.activation_args.data(), network_.activation_args.size()};
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
  GroupedGemms gemms_;
  Tensor input_;
  std::vector<Tensor> weights_, biases_, lora_a_, lora_b_;
};

ExpertsOutputs experts_cuda(const Tensor& x, const Routing& routing, const FeedForward& network,
                            bool keep_hidden) {
  const auto* op = network.op();
  check_experts(op, x, routing, network);
  const c10::OptionalDeviceGuard guard(x.device());
  const Experts experts(op, x, routing, network);
  std::vector<Tensor> hidden;
  Tensor a = experts.input();
  for (int64_t l = 0; l + 1 < experts.num_layers(); ++l) {
    const Tensor z = experts.linear(l, a);
    a = experts.next_input(l, z);
    if (keep_hidden) hidden.push_back(z);
  }
  const Tensor rows = experts.linear(experts.num_layers() - 1, a);
  if (!routing.gates) return {rows, hidden};
  Tensor y = experts_output(empty, x, routing, network);
  sum_over_slots<Cuda>(rows, experts.slots(), routing.gates->to(accumulate_type(x)), y);
  return {y, hidden};
}

ExpertsGradients experts_backward_cuda(const Tensor& grad_y, const Tensor& x,
                                       const Routing& routing, const FeedForward& network,
                                       at::TensorList hidden, bool needs_x,
                                       const c10::List<bool>& needs_parameters) {
  constexpr auto* op = "_experts_backward";
  check_experts_backward(grad_y, x, routing, network, hidden, needs_parameters);
  const c10::OptionalDeviceGuard guard(x.device());
  // A backward pass under autocast would cast the inputs of torch's GEMMs to the autocast type.
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  const Experts experts(op, x, routing, network);
  const int64_t last = experts.num_layers() - 1;

  std::vector<Tensor> inputs{experts.input()}, zs;
  for (int64_t l = 0; l < last; ++l) {
    zs.push_back(hidden.empty() ? experts.linear(l, inputs[l]) : hidden[l].contiguous());
    inputs.push_back(experts.next_input(l, zs[l]));
  }

  OptionalTensor gates;
  if (routing.gates) gates = routing.gates->to(accumulate_type(x)).contiguous();
  Tensor grad_gates = experts_gradient_of_gates(empty, x, gates);
  // Where a gradient is not needed or the layer has no adapter, it stays empty.
  std::vector<Tensor> grad_parameters;
  for (const at::TensorList parameters : network.parameters()) {
    for (const Tensor& each : parameters) {
      const bool needed = needs_parameters[grad_parameters.size()] && each.numel() == 0;
      grad_parameters.push_back(experts_gradient_of(empty, each, needed));
    }
  }
  const int64_t first_learned = first_learned_layer(network, needs_parameters);
  const Tensor dy = grad_y.contiguous();
  Tensor grad = gates ? experts.rows_of(dy) : dy;  // for the rows, not multiplied by the gates
  for (int64_t l = last; l >= 0; --l) {
    const bool needs_rest = needs_x || l > first_learned;
    const bool needs_gates = l == last && gates;
    Tensor grad_in;
    if (needs_rest || needs_gates) {
      grad_in = experts.input_gradient(l, grad);
    }
    if (needs_gates) experts.gate_backward(grad_in, inputs[l], grad, *gates, grad_gates);
    int64_t parameter = l;
    if (needs_parameters[parameter]) {
      grad_parameters[parameter] = experts.matrix_gradient(experts.weight(l), inputs[l], grad);
    }
    if (experts.has_bias() && needs_parameters[parameter += last + 1]) {
      grad_parameters[parameter] = experts.sum_by_expert(grad);
    }
    if (experts.has_lora(l)) {
      if (needs_parameters[parameter += last + 1]) {
        grad_parameters[parameter] = experts.matrix_gradient(
            experts.lora_a(l), experts.masked(l, inputs[l]), experts.lora_gradient(l, grad));
      }
      if (needs_parameters[parameter += last + 1]) {
        grad_parameters[parameter] =
            experts.matrix_gradient(experts.lora_b(l), experts.lora_input(l, inputs[l]), grad);
      }
    }
    if (!needs_rest) break;
    grad = l > 0 ? experts.activate_backward(zs[l - 1], grad_in) : grad_in;
  }
  Tensor grad_x = grad;  // the gradient of the rows, if x holds rows
  if (!needs_x || routing.inverse) grad_x = experts_gradient_of_x(empty, x, needs_x);
  if (needs_x && routing.inverse) {
    sum_over_slots<Cuda>(grad, experts.slots(), /*weights=*/Tensor(), grad_x);
  }
  return {grad_x, gates ? grad_gates.to(routing.gates->scalar_type()) : grad_gates,
          grad_parameters};
}

}  // namespace
}  // namespace moe_ext

TORCH_LIBRARY_IMPL(moe_ext, CUDA, m) {
  moe_ext::implement<"experts", &moe_ext::experts_of<moe_ext::experts_cuda>>(m);
  moe_ext::implement<"_experts_backward",
                     &moe_ext::experts_backward_of<moe_ext::experts_backward_cuda>>(m);
}
