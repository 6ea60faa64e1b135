// The cross-entropy of a linear layer on CUDA, after the GEMM.
#include <algorithm>
#include <limits>

#include "../kernels/linear_cross_entropy.h"
#include "../math/linear_cross_entropy.h"
#include "launch.cuh"

namespace moe_ext {
namespace cuda {
namespace {

// The logits of a block of tokens.
template <typename scalar_t>
struct Logits {
  using acc_t = acc_type<scalar_t>;

  const scalar_t* products;  // [tokens, num_classes]
  const acc_t* bias;
  int64_t num_classes;
  acc_t cap;  // 0: no softcap

  __device__ acc_t at(int64_t token, int64_t v) const {
    acc_t x = static_cast<acc_t>(products[token * num_classes + v]);
    if (bias != nullptr) x += bias[v];
    return cap == acc_t(0) ? x : math::Softcap<acc_t>{cap}.value(x);
  }
  __device__ acc_t slope(acc_t logit) const {
    return cap == acc_t(0) ? acc_t(1) : math::Softcap<acc_t>{cap}.slope(logit);
  }
};

// Returns the largest value of the threads of a block to every thread; no value may be NaN.
template <typename T>
__device__ __forceinline__ T block_max(T value, T* space) {
  value = warp_max(value);
  if (threadIdx.x % kWarp == 0) space[threadIdx.x / kWarp] = value;
  __syncthreads();
  for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) value = std::max(value, space[warp]);
  __syncthreads();
  return value;
}

// The loss and the log-sum-exp of a token; one block. The loss is NaN if the target is no class:
// the host cannot check the targets without waiting for the device.
template <typename scalar_t, typename acc_t>
__global__ void loss_kernel(Logits<scalar_t> logits, const int64_t* __restrict__ target,
                            int64_t ignore_index, math::CrossEntropy<acc_t> function,
                            acc_t* __restrict__ losses, acc_t* __restrict__ lse) {
  __shared__ acc_t space[kThreads / kWarp];
  const int64_t token = blockIdx.x;
  const int64_t y = target[token];
  acc_t largest = -std::numeric_limits<acc_t>::infinity();
  for (int64_t v = threadIdx.x; v < logits.num_classes; v += kThreads) {
    const acc_t logit = logits.at(token, v);
    largest = logit > largest ? logit : largest;
  }
  largest = block_max(largest, space);
  // Without a finite logit, the difference from the largest one would be NaN.
  const acc_t shift = largest == -std::numeric_limits<acc_t>::infinity() ? acc_t(0) : largest;
  acc_t sum = 0, sum_of_logits = 0, target_logit = 0;
  for (int64_t v = threadIdx.x; v < logits.num_classes; v += kThreads) {
    const acc_t logit = logits.at(token, v);
    sum += math::exp(logit - shift);
    sum_of_logits += logit;
    if (v == y) target_logit = logit;
  }
  sum = block_sum(sum, space);
  sum_of_logits = block_sum(sum_of_logits, space);
  target_logit = block_sum(target_logit, space);
  if (threadIdx.x > 0) return;
  const acc_t log_sum = std::log(sum);
  lse[token] = shift + log_sum;
  acc_t loss = function.loss(shift, log_sum, target_logit,
                             sum_of_logits / static_cast<acc_t>(logits.num_classes));
  if (y < 0 || y >= logits.num_classes) loss = std::numeric_limits<acc_t>::quiet_NaN();
  losses[token] = y == ignore_index ? acc_t(0) : loss;
}

// One block for each token.
template <typename scalar_t, typename acc_t>
__global__ void product_gradient_kernel(Logits<scalar_t> logits, const int64_t* __restrict__ target,
                                        int64_t ignore_index, math::CrossEntropy<acc_t> function,
                                        const acc_t* __restrict__ lse,
                                        const acc_t* __restrict__ grad, scalar_t* grad_products) {
  const int64_t token = blockIdx.x;
  const int64_t y = target[token];
  acc_t of_loss = grad == nullptr ? acc_t(1) : grad[token];
  if (y == ignore_index) of_loss = 0;
  const math::LogitGradient<acc_t> gradient(function, lse[token], of_loss,
                                            static_cast<acc_t>(logits.num_classes));
  for (int64_t v = threadIdx.x; v < logits.num_classes; v += kThreads) {
    const acc_t logit = logits.at(token, v);
    acc_t value = 0;
    if (!gradient.is_zero()) {
      value = gradient.other(logit) - (v == y ? gradient.target : acc_t(0));
      value *= logits.slope(logit);
    }
    grad_products[token * logits.num_classes + v] = static_cast<scalar_t>(value);
  }
}

template <typename scalar_t>
Logits<scalar_t> logits_of(const LinearClassifier<scalar_t>& classifier, const scalar_t* products) {
  return {.products = products,
          .bias = classifier.bias,
          .num_classes = classifier.num_classes,
          .cap = static_cast<acc_type<scalar_t>>(classifier.softcap.value_or(0))};
}

template <typename scalar_t>
math::CrossEntropy<acc_type<scalar_t>> function_of(const LinearClassifier<scalar_t>& classifier) {
  using acc_t = acc_type<scalar_t>;
  return {.smoothing = static_cast<acc_t>(classifier.label_smoothing),
          .z_loss = static_cast<acc_t>(classifier.z_loss)};
}

}  // namespace
}  // namespace cuda
using namespace cuda;

template <typename scalar_t>
void TokenLosses<scalar_t>::on_cuda(const CudaStream& stream) const {
  launch_blocks(stream, loss_kernel<scalar_t, acc_t>, classifier.num_tokens,
                logits_of(classifier, products), classifier.target, classifier.ignore_index,
                function_of(classifier), losses, lse);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(TokenLosses)

template <typename scalar_t>
void ProductGradients<scalar_t>::on_cuda(const CudaStream& stream) const {
  launch_blocks(stream, product_gradient_kernel<scalar_t, acc_t>, classifier.num_tokens,
                logits_of(classifier, products), classifier.target, classifier.ignore_index,
                function_of(classifier), lse, grad, grad_products);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(ProductGradients)

}  // namespace moe_ext
