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

// out = activation(z), or activation(a, b) of the two halves of z if the activation is gated.
template <typename scalar_t>
struct Activate {
  std::string_view activation;
  std::span<const double> activation_args;
  const scalar_t* z;  // [R, width], or [R, 2 width]
  int64_t num_rows, width;
  scalar_t* out;  // [R, width]

  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CUDA(Activate)

// grad_z = grad * activation'(z), or the same for a and b.
template <typename scalar_t>
struct ActivateBackward {
  std::string_view activation;
  std::span<const double> activation_args;
  const scalar_t* z;
  const scalar_t* grad;  // [R, width]
  int64_t num_rows, width;
  scalar_t* grad_z;  // like z

  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CUDA(ActivateBackward)

// The gradient of the gate of each slot, dG = <P, A> + <dy, b> of its row. Then P and dy are
// multiplied by the gate, in place. The last layer has the input A, P = dL/dA without the gates,
// and the bias b.
template <typename scalar_t>
struct GateBackward {
  using acc_t = acc_type<scalar_t>;

  scalar_t* p;           // [R, fan_in]
  const scalar_t* a;     // [R, fan_in]
  scalar_t* dy;          // [R, columns]
  const scalar_t* bias;  // [E, columns], or null
  RowGroups experts;
  Slots slots;
  const acc_t* gates;  // of each slot
  int64_t fan_in, columns;
  acc_t* grad_gates;  // of each slot

  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CUDA(GateBackward)

// The sum of the rows of each expert.
template <typename scalar_t>
struct SumByExpert {
  using acc_t = acc_type<scalar_t>;

  const scalar_t* rows;  // [R, columns]
  RowGroups experts;
  int64_t columns;
  acc_t* sums;  // [E, columns]

  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CUDA(SumByExpert)

}  // namespace moe_ext
