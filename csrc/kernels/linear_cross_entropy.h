// The cross-entropy of a linear layer.
#pragma once

#include <optional>

#include "types.h"

namespace moe_ext {

// A linear layer with targets, and the loss of a token.
template <typename scalar_t>
struct LinearClassifier {
  const scalar_t* input;           // [T, width]
  const scalar_t* weight;          // [V, width]
  const int64_t* target;           // [T], in [0, V) or ignore_index
  const acc_type<scalar_t>* bias;  // [V], or null
  int64_t num_tokens, width, num_classes;
  int64_t ignore_index;
  double label_smoothing;
  double z_loss;
  std::optional<double> softcap;
};

// The losses of the tokens, and the gradients of their weighted sum. What is null is not computed.
template <typename scalar_t>
struct LinearCrossEntropy {
  using acc_t = acc_type<scalar_t>;

  LinearClassifier<scalar_t> classifier;
  acc_t* losses;       // [T]
  acc_t* loss;         // their sum
  acc_t* new_lse;      // [T], the log-sum-exp of each token, with `losses`
  const acc_t* lse;    // [T], for the gradients; may be new_lse
  const acc_t* grad;   // [T], the weights of the sum
  acc_t* grad_input;   // [T, width]
  acc_t* grad_weight;  // [V, width]
  acc_t* grad_bias;    // [V]

  void on_cpu() const;
};
MOE_EXT_RUNS_ON_CPU(LinearCrossEntropy)

// to = scale from
template <typename scalar_t>
struct ScaledCopy {
  acc_type<scalar_t> scale;
  const acc_type<scalar_t>* from;
  int64_t size;
  scalar_t* to;

  void on_cpu() const;
};
MOE_EXT_RUNS_ON_CPU(ScaledCopy)

// On CUDA, a GEMM of torch computes the products [T, V] of input and weight for a block of tokens.
// These kernels do the rest and read neither input nor weight.

// The loss and the log-sum-exp of each token.
template <typename scalar_t>
struct TokenLosses {
  using acc_t = acc_type<scalar_t>;

  LinearClassifier<scalar_t> classifier;
  const scalar_t* products;
  acc_t* losses;
  acc_t* lse;

  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CUDA(TokenLosses)

// The gradients of the products.
template <typename scalar_t>
struct ProductGradients {
  using acc_t = acc_type<scalar_t>;

  LinearClassifier<scalar_t> classifier;
  const scalar_t* products;
  const acc_t* lse;
  const acc_t* grad;        // dL/dloss of each token, or null: 1
  scalar_t* grad_products;  // may be the products

  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CUDA(ProductGradients)

}  // namespace moe_ext
