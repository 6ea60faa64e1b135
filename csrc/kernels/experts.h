// The feed-forward networks of the experts (Eq. 1).
#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "../packed.h"
#include "row_groups.h"
#include "slots.h"

namespace moe_ext {

// A matrix [rows, columns] of each expert; `transposed`: stored as [columns, rows].
template <typename T>
struct ExpertMatrices {
  T* data = nullptr;
  bool transposed = false;
};

// A linear layer of each expert. A layer with an adapter (see LoraLayers) has a rank above 0.
template <typename scalar_t>
struct ExpertLayer {
  int64_t fan_in, columns;
  ExpertMatrices<const scalar_t> weight;  // [fan_in, columns], if the weights are not packed
  const uint8_t* panels = nullptr;        // packed weights, in a layout
  PackedLayout layout = {};
  const scalar_t* bias = nullptr;  // [E, columns], or null
  int64_t rank = 0;
  ExpertMatrices<const scalar_t> lora_a = {};  // [fan_in, rank]
  ExpertMatrices<const scalar_t> lora_b = {};  // [rank, columns]
  double lora_scale = 0;
  const bool* lora_mask = nullptr;  // [R, fan_in], or null
};

// The networks, all of one architecture.
template <typename scalar_t>
struct ExpertLayers {
  int64_t num_experts;
  std::span<const ExpertLayer<scalar_t>> layers;
  std::string_view activation;
  std::span<const double> activation_args;
  bool packed;
  bool integer;  // the arithmetic of packed weights
};

// The input: tokens with slots, or rows.
template <typename scalar_t>
struct ExpertInput {
  const scalar_t* x;  // [T, width], or [R, width] without slots
  std::optional<Slots> slots;
  const int64_t* offsets;  // [E + 1], or null: every expert has R / E rows
  int64_t num_rows;        // R
};

template <typename scalar_t>
struct ExpertsForward {
  ExpertLayers<scalar_t> network;
  ExpertInput<scalar_t> input;
  std::span<scalar_t* const> hidden;  // [R, columns] of each layer but the last; may be empty
  scalar_t* rows;                     // [R, columns of the last layer]

  void on_cpu() const;
};
MOE_EXT_RUNS_ON_CPU(ExpertsForward)

// The gradients of a layer's parameters; null if they are not needed.
template <typename scalar_t>
struct ExpertLayerGradients {
  scalar_t *weight, *bias, *lora_a, *lora_b;
};

template <typename scalar_t>
struct ExpertsBackward {
  using acc_t = acc_type<scalar_t>;

  ExpertLayers<scalar_t> network;
  ExpertInput<scalar_t> input;
  std::span<scalar_t* const> hidden;  // as in forward; recomputed if it is empty
  const scalar_t* grad;               // of y [T, columns] with gates, else of the output rows
  const acc_t* gates;                 // of each slot, or null
  std::span<const ExpertLayerGradients<scalar_t>> gradients;
  int64_t first_learned;  // the first layer with such a gradient; the number of layers if none has
  acc_t* grad_gates;      // of each slot, or null
  scalar_t* grad_rows;    // of the input rows [R, width], or null

  void on_cpu() const;
};
MOE_EXT_RUNS_ON_CPU(ExpertsBackward)

// On CUDA, torch or GroupedGemm multiplies the matrices; these kernels do the rest.

// The weights [E, inputs, outputs] of packed panels.
template <typename scalar_t>
struct UnpackedWeight {
  const uint8_t* panels;  // [E, panels, bytes]
  PackedLayout layout;
  int64_t num_experts;
  scalar_t* weight;

  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CUDA(UnpackedWeight)

// The GEMMs of CUDA add no bias: Z is the output of a layer without it. The kernels that read Z add
// the layer's bias in the type of sums.

// out = activation(z + bias), or activation(a, b) of the two halves of z + bias if it is gated.
template <typename scalar_t>
struct Activate {
  std::string_view activation;
  std::span<const double> activation_args;
  const scalar_t* z;     // [R, width], or [R, 2 width]
  const scalar_t* bias;  // [E, width], or [E, 2 width]; may be null
  RowGroups experts;
  int64_t width;
  scalar_t* out;  // [R, width]

  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CUDA(Activate)

// The gates g in the backward pass of the last layer, with the input A [R, width].
//
// The layer's gradients are sums of products of g, A and dy, so one of the factors is multiplied by
// the gates: A, or the caller does it with dy.
template <typename scalar_t>
struct GatesBackward {
  using acc_t = acc_type<scalar_t>;

  Slots slots;
  const acc_t* gates;    // of each slot; null: no gates
  const scalar_t* dy;    // [T, columns]
  const scalar_t* bias;  // of the last layer, [E, columns], or null
  int64_t columns;
  bool multiplies_a;
  acc_t* grad_gates;  // of each slot: <P, A> + <dy, bias>
  acc_t* row_gates;   // the gate of each row, [R]
};

// The backward pass of an activation A = activation(z + bias), with P = dL/dA without the gates:
// grad_z = g P activation'(z + bias), and the activation again. Without gates, g = 1.
template <typename scalar_t>
struct ActivateBackward {
  std::string_view activation;
  std::span<const double> activation_args;
  const scalar_t* z;  // z and bias are those of Activate
  const scalar_t* bias;
  const scalar_t* p;  // [R, width]
  RowGroups experts;
  int64_t width;
  GatesBackward<scalar_t> gates;
  scalar_t* a;       // A, or g A if the gates multiply it, [R, width]; may be null
  scalar_t* grad_z;  // like z; may be null

  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CUDA(ActivateBackward)

// sums[t] = sum of gates[s] * (rows[slots.row(s)] + bias) over the slots s of token t, in order,
// with the bias of the row's expert: SumOverSlots for the last layer.
template <typename scalar_t>
struct SumWithBias {
  const scalar_t* rows;  // [R, width]
  const scalar_t* bias;  // [E, width], or null: 0
  RowGroups experts;
  const acc_type<scalar_t>* gates;  // of each slot, or null: exactly 1
  Slots slots;
  int64_t width;
  scalar_t* sums;  // [T, width]

  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CUDA(SumWithBias)

// The sum of the rows of each expert, multiplied by their weights.
template <typename scalar_t>
struct SumByExpert {
  using acc_t = acc_type<scalar_t>;

  const scalar_t* rows;  // [R, columns]
  const acc_t* weights;  // [R], or null: exactly 1
  RowGroups experts;
  int64_t columns;
  acc_t* sums;  // [E, columns]

  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CUDA(SumByExpert)

}  // namespace moe_ext
