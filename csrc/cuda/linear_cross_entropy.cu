// The cross-entropy of a linear layer on CUDA. The logits of a block of tokens are in memory at a
// time: torch's GEMM computes them, one kernel reduces them, and one kernel replaces them by their
// gradients.
#include <ATen/Context.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "../implement.h"
#include "../linear_cross_entropy.h"
#include "../math/linear_cross_entropy.h"
#include "launch.cuh"

namespace moe_ext::cuda {
namespace {

// The logits of a block of tokens; enough to keep the device busy.
constexpr int64_t kMaxLogits = 1 << 26;

// The logits of a block of tokens as the GEMM leaves them.
template <typename scalar_t>
struct Products {
  using acc_t = at::opmath_type<scalar_t>;

  scalar_t* data;  // [tokens, num_classes]
  const acc_t* bias;
  int64_t num_classes;
  acc_t cap;  // 0: no softcap

  __device__ acc_t logit(int64_t token, int64_t v) const {
    acc_t x = static_cast<acc_t>(data[token * num_classes + v]);
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
__global__ void loss_kernel(Products<scalar_t> products, const int64_t* __restrict__ target,
                            int64_t ignore_index, math::CrossEntropy<acc_t> function,
                            acc_t* __restrict__ losses, acc_t* __restrict__ lse) {
  __shared__ acc_t space[kThreads / kWarp];
  const int64_t token = blockIdx.x;
  const int64_t y = target[token];
  acc_t largest = -std::numeric_limits<acc_t>::infinity();
  for (int64_t v = threadIdx.x; v < products.num_classes; v += kThreads) {
    const acc_t logit = products.logit(token, v);
    largest = logit > largest ? logit : largest;
  }
  largest = block_max(largest, space);
  // Without a finite logit, the difference from the largest one would be NaN.
  const acc_t shift = largest == -std::numeric_limits<acc_t>::infinity() ? acc_t(0) : largest;
  acc_t sum = 0, logits = 0, target_logit = 0;
  for (int64_t v = threadIdx.x; v < products.num_classes; v += kThreads) {
    const acc_t logit = products.logit(token, v);
    sum += math::exp(logit - shift);
    logits += logit;
    if (v == y) target_logit = logit;
  }
  sum = block_sum(sum, space);
  logits = block_sum(logits, space);
  target_logit = block_sum(target_logit, space);
  if (threadIdx.x > 0) return;
  const acc_t log_sum = std::log(sum);
  lse[token] = shift + log_sum;
  acc_t loss = function.loss(shift, log_sum, target_logit,
                             logits / static_cast<acc_t>(products.num_classes));
  if (y < 0 || y >= products.num_classes) loss = std::numeric_limits<acc_t>::quiet_NaN();
  losses[token] = y == ignore_index ? acc_t(0) : loss;
}

// Replaces the logits of a token by their gradients for dL/dloss = grad; one block. Without `grad`,
// dL/dloss is 1.
template <typename scalar_t, typename acc_t>
__global__ void logit_gradient_kernel(Products<scalar_t> products,
                                      const int64_t* __restrict__ target, int64_t ignore_index,
                                      math::CrossEntropy<acc_t> function,
                                      const acc_t* __restrict__ lse,
                                      const acc_t* __restrict__ grad) {
  const int64_t token = blockIdx.x;
  const int64_t y = target[token];
  acc_t of_loss = grad == nullptr ? acc_t(1) : grad[token];
  if (y == ignore_index) of_loss = 0;
  const math::LogitGradient<acc_t> gradient(function, lse[token], of_loss,
                                            static_cast<acc_t>(products.num_classes));
  for (int64_t v = threadIdx.x; v < products.num_classes; v += kThreads) {
    const acc_t logit = products.logit(token, v);
    acc_t value = 0;
    if (!gradient.is_zero()) {
      value = gradient.other(logit) - (v == y ? gradient.target : acc_t(0));
      value *= products.slope(logit);
    }
    products.data[token * products.num_classes + v] = static_cast<scalar_t>(value);
  }
}

template <typename scalar_t>
class LinearCrossEntropy {
 public:
  using acc_t = at::opmath_type<scalar_t>;

  LinearCrossEntropy(const Classifier& classifier, const LossOptions& options)
      : input_(classifier.input.contiguous()),
        weight_(classifier.weight.contiguous()),
        target_(contiguous_index(classifier.target)),
        ignore_index_(options.ignore_index),
        cap_(static_cast<acc_t>(options.softcap.value_or(0))),
        function_{.smoothing = static_cast<acc_t>(options.label_smoothing),
                  .z_loss = static_cast<acc_t>(options.z_loss)} {
    if (classifier.bias) {
      bias_ = classifier.bias->to(c10::CppTypeToScalarType<acc_t>::value).contiguous();
    }
  }

  // Writes the loss and the log-sum-exp of each token. Writes the gradients that are not empty, for
  // dL/dloss = 1.
  void forward(const Tensor& losses, const Tensor& lse,
               const std::vector<Tensor>& gradients) const {
    const bool differentiates = std::any_of(gradients.begin(), gradients.end(),
                                            [](const Tensor& each) { return each.numel() > 0; });
    for_each_block(
        gradients, [&](int64_t first, const Products<scalar_t>& products, int64_t num_tokens) {
          launch(loss_kernel<scalar_t, acc_t>, grid(num_tokens), kThreads, 0, products,
                 targets() + first, ignore_index_, function_,
                 losses.mutable_data_ptr<acc_t>() + first, lse.mutable_data_ptr<acc_t>() + first);
          if (differentiates) differentiate(first, products, num_tokens, lse, nullptr);
        });
  }

  // Writes the gradients that are not empty; grad is dL/dloss of each token, or undefined for 1.
  void backward(const Tensor& lse, const Tensor& grad, const std::vector<Tensor>& gradients) const {
    for_each_block(gradients,
                   [&](int64_t first, const Products<scalar_t>& products, int64_t num_tokens) {
                     differentiate(first, products, num_tokens, lse,
                                   grad.defined() ? grad.const_data_ptr<acc_t>() + first : nullptr);
                   });
  }

  // Returns the number of targets that are not ignored, on the device.
  Tensor num_targets() const {
    return at::sum(target_.ne(ignore_index_)).to(c10::CppTypeToScalarType<acc_t>::value);
  }

 private:
  const int64_t* targets() const { return target_.template const_data_ptr<int64_t>(); }

  void differentiate(int64_t first, const Products<scalar_t>& products, int64_t num_tokens,
                     const Tensor& lse, const acc_t* grad) const {
    launch(logit_gradient_kernel<scalar_t, acc_t>, grid(num_tokens), kThreads, 0, products,
           targets() + first, ignore_index_, function_, lse.const_data_ptr<acc_t>() + first, grad);
  }

  // Calls body(first, products, num_tokens) for blocks of tokens; body leaves the gradients of the
  // logits in the products if a gradient is needed.
  template <typename Body>
  void for_each_block(const std::vector<Tensor>& gradients, const Body& body) const {
    const int64_t num_tokens = input_.size(0), num_classes = weight_.size(0);
    const auto needs = [&](int64_t i) { return gradients[i].numel() > 0; };
    const int64_t size = std::max<int64_t>(kMaxLogits / num_classes, 1);
    for (int64_t i : {1, 2}) gradients[i].zero_();
    for (int64_t first = 0; first < num_tokens; first += size) {
      const int64_t end = std::min(num_tokens, first + size);
      // An ignored token may not be finite. The gradient of weight has the product of the token and
      // its gradient 0.
      const Tensor ignored = target_.slice(0, first, end).eq(ignore_index_).unsqueeze(1);
      const Tensor rows = input_.slice(0, first, end).masked_fill(ignored, 0);
      const Tensor logits = at::mm(rows, weight_.t());
      body(first,
           Products<scalar_t>{logits.mutable_data_ptr<scalar_t>(),
                              bias_.defined() ? bias_.template const_data_ptr<acc_t>() : nullptr,
                              num_classes, cap_},
           rows.size(0));
      if (needs(0))
        gradients[0].slice(0, first, first + rows.size(0)).copy_(at::mm(logits, weight_));
      if (needs(1)) {
        // A sum over many tokens can overflow float16.
        const auto type = std::is_same_v<scalar_t, at::Half> ? at::kFloat : rows.scalar_type();
        gradients[1].add_(at::mm(logits.t().to(type), rows.to(type)));
      }
      if (needs(2)) gradients[2].add_(at::sum(logits, 0, false, gradients[2].scalar_type()));
    }
  }

  at::NoTF32Guard no_tf32_;
  Tensor input_, weight_, target_, bias_;
  int64_t ignore_index_;
  acc_t cap_;
  math::CrossEntropy<acc_t> function_;
};

LinearCrossEntropyOutputs linear_cross_entropy_cuda(const Classifier& classifier,
                                                    const LossOptions& options,
                                                    const c10::List<bool>& keep_gradients) {
  constexpr auto op = "linear_cross_entropy";
  check_linear_cross_entropy(op, classifier, options, "keep_gradients", keep_gradients);
  const c10::cuda::OptionalCUDAGuard guard(classifier.input.device());
  LinearCrossEntropyOutputs outputs =
      linear_cross_entropy_outputs(empty, classifier, options, keep_gradients);
  auto& [loss, lse, gradients] = outputs;
  const auto type = classifier.input.scalar_type();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, op, [&] {
    const LinearCrossEntropy<scalar_t> problem(classifier, options);
    const Tensor losses = options.reduces() ? empty_of(empty, lse) : loss;
    problem.forward(losses, lse, gradients);
    if (options.reduces()) loss.copy_(at::sum(losses));
    if (options.reduction != "mean") return;
    const Tensor count = problem.num_targets();
    loss.div_(count);
    for (const Tensor& gradient : gradients) gradient.div_(count.clamp_min(1));
  });
  return outputs;
}

std::vector<Tensor> linear_cross_entropy_backward_cuda(const Tensor& grad_loss,
                                                       const Classifier& classifier,
                                                       const LossOptions& options,
                                                       const Tensor& lse, at::TensorList gradients,
                                                       const c10::List<bool>& needs) {
  constexpr auto op = "_linear_cross_entropy_backward";
  check_linear_cross_entropy_backward(grad_loss, classifier, options, lse, gradients, needs);
  const c10::cuda::OptionalCUDAGuard guard(classifier.input.device());
  // A backward pass under autocast would cast the inputs of torch's GEMMs to the autocast type.
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::DispatchKey::AutocastCUDA);
  const auto type = classifier.input.scalar_type();
  auto results = linear_cross_entropy_gradients(empty, classifier, needs, accumulate_type(lse));
  if (!gradients.empty()) {
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].numel() > 0) results[i].copy_(gradients[i]).mul_(grad_loss);
    }
  } else {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, op, [&] {
      const LinearCrossEntropy<scalar_t> problem(classifier, options);
      problem.backward(lse.contiguous(), options.reduces() ? Tensor() : grad_loss.contiguous(),
                       results);
      if (!options.reduces()) return;
      Tensor factor = grad_loss;
      if (options.reduction == "mean") factor = grad_loss.div(problem.num_targets().clamp_min(1));
      for (const Tensor& result : results) result.mul_(factor);
    });
  }
  convert_gradients(classifier, results);
  return results;
}

}  // namespace
}  // namespace moe_ext::cuda

TORCH_LIBRARY_IMPL(moe_ext, CUDA, m) {
  moe_ext::implement<"linear_cross_entropy",
                     &moe_ext::linear_cross_entropy_of<moe_ext::cuda::linear_cross_entropy_cuda>>(
      m);
  moe_ext::implement<"_linear_cross_entropy_backward",
                     &moe_ext::linear_cross_entropy_backward_of<
                         moe_ext::cuda::linear_cross_entropy_backward_cuda>>(m);
}
