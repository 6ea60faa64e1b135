// The experts on CUDA: gather of the tokens, feed-forward networks, gated sum (Eq. 1).
//
// A layer of an expert computes Z = A W + b; the activation of Z is the input A of the next layer.
// Backward, with P = dL/dA of the last layer before the gates are applied:
//   dG = <P, A> + <dy, b>. This does not need the expert's output, so it is not saved.
//   dW = A^T dZ, db = sum of the rows of dZ, dA = dZ W^T, dZ' = dA * activation'(Z').
// In the last layer dZ = g dy: dG is computed first, then P and dy are multiplied by the gate g.
#include <torch/library.h>

#include <numeric>
#include <tuple>
#include <vector>

#include "../experts.h"
#include "../implement.h"
#include "chunks.cuh"
#include "gemm.cuh"
#include "packs.cuh"
#include "unpack.cuh"

namespace moe_ext::cuda {
namespace {

// The two packs of z with the pairs (a, b) of a pack of gated activations. Activation i of a row
// has a in column i and b in column width + i; if interleaved, in the columns 2 i and 2 i + 1.
template <typename Activation, typename scalar_t, int kSize>
struct PairsOfPacks {
  using Packed = Pack<scalar_t, kSize>;
  Packed first, second;

  // Returns the place of the first pack; `i` counts the packs of activations, `packs` are in a row.
  static __device__ __forceinline__ int64_t place(int64_t i, int64_t packs) {
    return Activation::kInterleaved ? 2 * i : i + i / packs * packs;
  }
  static __device__ __forceinline__ int64_t distance(int64_t packs) {
    return Activation::kInterleaved ? 1 : packs;
  }
  __device__ __forceinline__ scalar_t& a(int d) {
    return Activation::kInterleaved ? at(2 * d) : first.values[d];
  }
  __device__ __forceinline__ scalar_t& b(int d) {
    return Activation::kInterleaved ? at(2 * d + 1) : second.values[d];
  }

 private:
  __device__ __forceinline__ scalar_t& at(int column) {
    return column < kSize ? first.values[column] : second.values[column - kSize];
  }
};

// out = activation(z), or activation(a, b) if it is gated; a and b are `width` wide. A thread has
// some columns of a row.
template <typename Activation, typename scalar_t, typename acc_t, int kSize>
__global__ void activate_kernel(Activation activation, const scalar_t* __restrict__ z,
                                int64_t num_rows, int64_t width, scalar_t* __restrict__ out) {
  using Packed = Pack<scalar_t, kSize>;
  const int64_t packs = width / kSize;
  const int64_t all = num_rows * packs;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < all;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const auto* from = reinterpret_cast<const Packed*>(z);
    Packed activated;
    if constexpr (Activation::kGated) {
      using Pairs = PairsOfPacks<Activation, scalar_t, kSize>;
      const int64_t place = Pairs::place(i, packs);
      Pairs pairs{from[place], from[place + Pairs::distance(packs)]};
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        activated.values[d] = static_cast<scalar_t>(
            activation.value(static_cast<acc_t>(pairs.a(d)), static_cast<acc_t>(pairs.b(d))));
      }
    } else {
      const Packed a = from[i];
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        activated.values[d] =
            static_cast<scalar_t>(activation.value(static_cast<acc_t>(a.values[d])));
      }
    }
    reinterpret_cast<Packed*>(out)[i] = activated;
  }
}

Tensor activate(const FeedForward& network, const Tensor& z, int64_t width) {
  const int64_t num_rows = z.size(0);
  Tensor out = at::empty({num_rows, width}, z.options());
  math::with_activation(network.activation, network.activation_args, [&](auto activation) {
    using Activation = decltype(activation);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, z.scalar_type(), "experts", [&] {
      const auto* z_data = z.const_data_ptr<scalar_t>();
      auto* out_data = out.mutable_data_ptr<scalar_t>();
      with_pack_size<scalar_t>(width, {z_data, out_data}, [&](auto size) {
        launch(activate_kernel<Activation, scalar_t, at::opmath_type<scalar_t>, size>,
               strided_grid(num_rows * (width / size)), kThreads, 0, activation, z_data, num_rows,
               width, out_data);
      });
    });
  });
  return out;
}

// grad_z = grad * activation'(z); for a and b if the activation is gated.
template <typename Activation, typename scalar_t, typename acc_t, int kSize>
__global__ void activate_backward_kernel(Activation activation, const scalar_t* __restrict__ z,
                                         const scalar_t* __restrict__ grad, int64_t num_rows,
                                         int64_t width, scalar_t* __restrict__ grad_z) {
  using Packed = Pack<scalar_t, kSize>;
  const int64_t packs = width / kSize;
  const int64_t all = num_rows * packs;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < all;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const Packed g = reinterpret_cast<const Packed*>(grad)[i];
    const auto* from = reinterpret_cast<const Packed*>(z);
    auto* to = reinterpret_cast<Packed*>(grad_z);
    if constexpr (Activation::kGated) {
      using Pairs = PairsOfPacks<Activation, scalar_t, kSize>;
      const int64_t place = Pairs::place(i, packs), distance = Pairs::distance(packs);
      Pairs pairs{from[place], from[place + distance]};
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        const math::Pair<acc_t> gradient =
            activation.gradient(static_cast<acc_t>(g.values[d]), static_cast<acc_t>(pairs.a(d)),
                                static_cast<acc_t>(pairs.b(d)));
        pairs.a(d) = static_cast<scalar_t>(gradient.a);
        pairs.b(d) = static_cast<scalar_t>(gradient.b);
      }
      to[place] = pairs.first;
      to[place + distance] = pairs.second;
    } else {
      const Packed a = from[i];
      Packed grad_a;
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        grad_a.values[d] = static_cast<scalar_t>(
            activation.gradient(static_cast<acc_t>(g.values[d]), static_cast<acc_t>(a.values[d])));
      }
      to[i] = grad_a;
    }
  }
}

Tensor activate_backward(const FeedForward& network, const Tensor& z, const Tensor& grad) {
  Tensor grad_z = at::empty(z.sizes(), z.options());
  const int64_t num_rows = grad.size(0), width = grad.size(1);
  math::with_activation(network.activation, network.activation_args, [&](auto activation) {
    using Activation = decltype(activation);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, z.scalar_type(), "experts", [&] {
      const auto* z_data = z.const_data_ptr<scalar_t>();
      const auto* grad_data = grad.const_data_ptr<scalar_t>();
      auto* grad_z_data = grad_z.mutable_data_ptr<scalar_t>();
      with_pack_size<scalar_t>(width, {z_data, grad_data, grad_z_data}, [&](auto size) {
        launch(activate_backward_kernel<Activation, scalar_t, at::opmath_type<scalar_t>, size>,
               strided_grid(num_rows * (width / size)), kThreads, 0, activation, z_data, grad_data,
               num_rows, width, grad_z_data);
      });
    });
  });
  return grad_z;
}

// dG of a slot = <P, A> + <dy, b> of its row. Then P and dy are multiplied by the gate, in place.
// Both may contain a loss scale, which keeps them in the range of half precision. One warp per
// token.
template <typename scalar_t, typename acc_t, int kSize>
__global__ void gate_backward_kernel(scalar_t* __restrict__ p, const scalar_t* __restrict__ a,
                                     scalar_t* __restrict__ dy, const scalar_t* __restrict__ bias,
                                     Groups experts, Slots slots, const acc_t* __restrict__ gates,
                                     int64_t fan_in, int64_t columns,
                                     acc_t* __restrict__ grad_gates) {
  using Packed = Pack<scalar_t, kSize>;
  const int64_t t = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (t >= slots.num_tokens) return;  // uniform over the warp
  const int64_t end = slots.end(t);
  for (int64_t slot = slots.begin(t); slot < end; ++slot) {
    const int64_t row = slots.row(slot);
    const acc_t gate = gates[slot];
    auto* p_row = reinterpret_cast<Packed*>(p + row * fan_in);
    auto* dy_row = reinterpret_cast<Packed*>(dy + row * columns);
    const auto* a_row = reinterpret_cast<const Packed*>(a + row * fan_in);
    const scalar_t* expert_bias = bias == nullptr ? nullptr : bias + experts.of(row) * columns;
    acc_t product = 0;
    for (int64_t i = lane; i < fan_in / kSize; i += kWarp) {
      Packed ps = p_row[i];
      const Packed as = a_row[i];
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        const acc_t value = static_cast<acc_t>(ps.values[d]);
        product = std::fma(value, static_cast<acc_t>(as.values[d]), product);
        ps.values[d] = static_cast<scalar_t>(gate * value);
      }
      p_row[i] = ps;
    }
    for (int64_t i = lane; i < columns / kSize; i += kWarp) {
      Packed dys = dy_row[i];
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        const acc_t value = static_cast<acc_t>(dys.values[d]);
        if (expert_bias != nullptr) {
          product = std::fma(value, static_cast<acc_t>(expert_bias[i * kSize + d]), product);
        }
        dys.values[d] = static_cast<scalar_t>(gate * value);
      }
      dy_row[i] = dys;
    }
    product = warp_sum(product);
    if (lane == 0) grad_gates[slot] = product;
  }
}

// Sums a chunk of the rows; each lane of a warp has some columns.
template <typename scalar_t, typename acc_t, int kSize>
__global__ void partial_sums_by_expert_kernel(const scalar_t* __restrict__ rows, Groups experts,
                                              int64_t columns, int64_t chunk_size,
                                              acc_t* __restrict__ partial_sums) {
  using Packed = Pack<scalar_t, kSize>;
  const int64_t packs = columns / kSize;
  const int64_t tiles = ceil_div(packs, kWarp);
  const int64_t warp = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / kWarp;
  const int64_t chunk = warp / tiles;
  const int64_t pack = warp % tiles * kWarp + threadIdx.x % kWarp;
  if (pack >= packs) return;
  const auto add = [&](int64_t first, int count, acc_t(&sum)[kSize]) {
#pragma unroll 4
    for (int r = 0; r < count; ++r) {
      const Packed row = reinterpret_cast<const Packed*>(rows)[(first + r) * packs + pack];
#pragma unroll
      for (int d = 0; d < kSize; ++d) sum[d] += static_cast<acc_t>(row.values[d]);
    }
  };
  sums_of_chunk<acc_t, kSize>(experts, chunk, chunk_size, add, [&](int64_t place, const auto& sum) {
#pragma unroll
    for (int d = 0; d < kSize; ++d) partial_sums[place * columns + pack * kSize + d] = sum[d];
  });
}

// State that forward and backward share: the layers and the source of the rows.
class Experts {
 public:
  Experts(const Tensor& x, const Routing& routing, const FeedForward& network)
      : network_(network),
        offsets_(routing.offsets ? contiguous_index(*routing.offsets) : Tensor()),
        num_rows_(routing.inverse ? routing.inverse->numel() : x.size(0)),
        num_experts_(network.weights[0].size(0)),
        products_(offsets_, num_rows_, num_experts_) {
    const auto layouts = packed_layouts(network, x.size(1));
    for (size_t l = 0; l < network.weights.size(); ++l) {
      const Tensor& weight = network.weights[l];
      weights_.push_back(layouts.empty() ? in_known_layout(weight)
                                         : unpacked(weight, layouts[l], x.options()));
    }
    for (const Tensor& bias : network.biases) biases_.push_back(readable_bias(bias));
    for (const Tensor& a : network.lora.a) lora_a_.push_back(readable_lora(a));
    for (const Tensor& b : network.lora.b) lora_b_.push_back(readable_lora(b));
    if (routing.inverse) {
      tensors_.emplace("experts", *routing.inverse, routing.token_offsets, Cuda::kReadsValues);
    }
    input_ = routing.inverse ? rows_of(x.contiguous()) : x.contiguous();
  }

  const Slots& slots() const { return tensors_->slots; }
  const GroupedProducts& products() const { return products_; }
  const Tensor& input() const { return input_; }
  int64_t num_layers() const { return static_cast<int64_t>(weights_.size()); }

  // Returns the tokens' rows; both tensors are contiguous.
  Tensor rows_of(const Tensor& tokens) const {
    Tensor rows = at::empty({num_rows_, tokens.size(1)}, tokens.options());
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
    const Tensor z = products_.times_weights(in, weight(layer), bias(layer));
    if (has_lora(layer)) z.add_(products_.times_weights(lora_input(layer, in), lora_b(layer)));
    return z;
  }

  // Returns dL/dA of a layer with grad = dL/dZ.
  Tensor input_gradient(int64_t layer, const Tensor& grad) const {
    const Tensor gradient = products_.times_weights(grad, weight(layer).mT());
    if (has_lora(layer)) {
      const Tensor share = products_.times_weights(lora_gradient(layer, grad), lora_a(layer).mT());
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
    return products_.times_weights(masked(layer, in), lora_a(layer))
        .mul_(network_.lora.scales[layer]);
  }
  // dL/d(A a), [R, rank]
  Tensor lora_gradient(int64_t layer, const Tensor& grad) const {
    return products_.times_weights(grad, lora_b(layer).mT()).mul_(network_.lora.scales[layer]);
  }

  // Returns the gradient of a matrix with the input a and grad, the gradient of its output, in the
  // memory layout of the matrix.
  Tensor matrix_gradient(const Tensor& matrix, const Tensor& a, const Tensor& grad) const {
    return is_transposed(matrix) ? products_.of_rows(grad, a).mT() : products_.of_rows(a, grad);
  }

  Tensor next_input(int64_t layer, const Tensor& z) const {
    return activate(network_, z, weight(layer + 1).size(1));
  }

  Tensor activate_backward(const Tensor& z, const Tensor& grad) const {
    return cuda::activate_backward(network_, z, grad);
  }

  // Writes the gradients of the gates; then multiplies p and dy by the gates, in place. The last
  // layer has the input a and p = dL/dA; dy [R, columns] is dL/dy of the rows.
  void gate_backward(const Tensor& p, const Tensor& a, const Tensor& dy, const Tensor& gates,
                     const Tensor& grad_gates) const {
    const Tensor last_bias = bias(num_layers() - 1);
    const int64_t fan_in = p.size(1), columns = dy.size(1);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, p.scalar_type(), "experts", [&] {
      using acc_t = at::opmath_type<scalar_t>;
      auto* p_data = p.mutable_data_ptr<scalar_t>();
      const auto* a_data = a.const_data_ptr<scalar_t>();
      auto* dy_data = dy.mutable_data_ptr<scalar_t>();
      with_pack_size<scalar_t>(
          std::gcd(fan_in, columns), {p_data, a_data, dy_data}, [&](auto size) {
            launch(gate_backward_kernel<scalar_t, acc_t, size>,
                   grid(ceil_div(slots().num_tokens * kWarp, kThreads)), kThreads, 0, p_data,
                   a_data, dy_data, has_bias() ? last_bias.const_data_ptr<scalar_t>() : nullptr,
                   groups(), slots(), gates.const_data_ptr<acc_t>(), fan_in, columns,
                   grad_gates.mutable_data_ptr<acc_t>());
          });
    });
  }

  // Returns the sum of each expert's rows, [E, columns].
  Tensor sum_by_expert(const Tensor& rows) const {
    const int64_t columns = rows.size(1), chunk_size = chunk_size_of(num_rows_);
    const int64_t num_chunks = ceil_div(num_rows_, chunk_size);
    const auto options = rows.options().dtype(accumulate_type(rows));
    const Tensor partial_sums = at::empty({num_chunks + num_experts_, columns}, options);
    Tensor sums = at::empty({num_experts_, columns}, options);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.scalar_type(), "experts", [&] {
      using acc_t = at::opmath_type<scalar_t>;
      const auto* rows_data = rows.const_data_ptr<scalar_t>();
      with_pack_size<scalar_t>(columns, {rows_data}, [&](auto size) {
        const int64_t tiles = ceil_div(columns / size, kWarp);
        launch(partial_sums_by_expert_kernel<scalar_t, acc_t, size>,
               grid(ceil_div(num_chunks * tiles, kThreads / kWarp)), kThreads, 0, rows_data,
               groups(), columns, chunk_size, partial_sums.mutable_data_ptr<acc_t>());
      });
      launch(sum_of_chunks_kernel<acc_t>, grid(num_experts_ * ceil_div(columns, kWarp)), kThreads,
             0, partial_sums.const_data_ptr<acc_t>(), columns, groups(), chunk_size,
             sums.mutable_data_ptr<acc_t>());
    });
    return sums.to(rows.scalar_type());
  }

 private:
  Groups groups() const {
    return {.bounds = offsets_.defined() ? offsets_.const_data_ptr<int64_t>() : nullptr,
            .num_groups = num_experts_,
            .num_rows = num_rows_};
  }

  const FeedForward& network_;
  Tensor offsets_;
  int64_t num_rows_, num_experts_;
  GroupedProducts products_;
  std::vector<Tensor> weights_, biases_, lora_a_, lora_b_;
  std::optional<SlotTensors> tensors_;  // of the tokens' slots
  Tensor input_;
};

ExpertsOutputs experts_cuda(const Tensor& x, const Routing& routing, const FeedForward& network,
                            bool keep_hidden) {
  check_experts(network.op(), x, routing, network);
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  const Experts experts(x, routing, network);
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
  check_experts_backward(grad_y, x, routing, network, hidden, needs_parameters);
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  // A backward pass under autocast would cast the inputs of torch's GEMMs to the autocast type.
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::DispatchKey::AutocastCUDA);
  const Experts experts(x, routing, network);
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
}  // namespace moe_ext::cuda

TORCH_LIBRARY_IMPL(moe_ext, CUDA, m) {
  moe_ext::implement<"experts", &moe_ext::experts_of<moe_ext::cuda::experts_cuda>>(m);
  moe_ext::implement<"_experts_backward",
                     &moe_ext::experts_backward_of<moe_ext::cuda::experts_backward_cuda>>(m);
}
