// The cross-entropy of a linear layer on CUDA. The logits of a block of tokens are in memory at a
// time: torch's GEMM computes them, one kernel reduces them, and one kernel replaces them by their
// gradients.
#include "../linear_cross_entropy.h"

#include <ATen/ops/sum.h>

#include <algorithm>
#include <vector>

#include "mm.h"

namespace moe_ext {
namespace {

// The logits of a block of tokens; enough to keep the device busy.
constexpr int64_t kMaxLogits = 1 << 26;

class BlockwiseCrossEntropy {
 public:
  BlockwiseCrossEntropy(const Classifier& classifier, const LossOptions& options)
      : tensors_(classifier, options) {}

  // Writes the loss and the log-sum-exp of each token. Writes the gradients that are not empty, for
  // dL/dloss = 1.
  void forward(const Tensor& losses, const Tensor& lse,
               const std::vector<Tensor>& gradients) const {
    const bool differentiates = std::any_of(gradients.begin(), gradients.end(),
                                            [](const Tensor& each) { return each.numel() > 0; });
    for_each_block(gradients, [&](int64_t first, const Tensor& products) {
      with_type(products, [&]<typename scalar_t>() {
        using acc_t = acc_type<scalar_t>;
        Cuda::run(TokenLosses<scalar_t>{.classifier = block<scalar_t>(first, products.size(0)),
                                        .products = products.const_data_ptr<scalar_t>(),
                                        .losses = losses.mutable_data_ptr<acc_t>() + first,
                                        .lse = lse.mutable_data_ptr<acc_t>() + first});
      });
      if (differentiates) differentiate(first, products, lse, /*grad=*/Tensor());
    });
  }

  // Writes the gradients that are not empty; grad is dL/dloss of each token, or undefined for 1.
  void backward(const Tensor& lse, const Tensor& grad, const std::vector<Tensor>& gradients) const {
    for_each_block(gradients, [&](int64_t first, const Tensor& products) {
      differentiate(first, products, lse, grad);
    });
  }

  // Returns the number of targets that are not ignored, on the device.
  Tensor num_targets() const {
    return at::sum(tensors_.target.ne(tensors_.options.ignore_index))
        .to(accumulate_type(tensors_.input));
  }

 private:
  // The arguments for some tokens.
  template <typename scalar_t>
  LinearClassifier<scalar_t> block(int64_t first, int64_t num_tokens) const {
    auto classifier = tensors_.classifier<scalar_t>();
    classifier.input += first * classifier.width;
    classifier.target += first;
    classifier.num_tokens = num_tokens;
    return classifier;
  }

  // Replaces the products of a block of tokens by their gradients.
  void differentiate(int64_t first, const Tensor& products, const Tensor& lse,
                     const Tensor& grad) const {
    with_type(products, [&]<typename scalar_t>() {
      using acc_t = acc_type<scalar_t>;
      auto* data = products.mutable_data_ptr<scalar_t>();
      Cuda::run(ProductGradients<scalar_t>{
          .classifier = block<scalar_t>(first, products.size(0)),
          .products = data,
          .lse = lse.const_data_ptr<acc_t>() + first,
          .grad = grad.defined() ? grad.const_data_ptr<acc_t>() + first : nullptr,
          .grad_products = data});
    });
  }

  // Calls body(first, products) for blocks of tokens; body leaves the gradients of the products in
  // their place if a gradient is needed.
  template <typename Body>
  void for_each_block(const std::vector<Tensor>& gradients, const Body& body) const {
    const auto& [input, weight, target, bias, options] = tensors_;
    const int64_t num_tokens = input.size(0), num_classes = weight.size(0);
    const auto needs = [&](int64_t i) { return gradients[i].numel() > 0; };
    const int64_t size = std::max<int64_t>(kMaxLogits / num_classes, 1);
    for (int64_t i : {1, 2}) gradients[i].zero_();
    for (int64_t first = 0; first < num_tokens; first += size) {
      const int64_t end = std::min(num_tokens, first + size);
      // An ignored token may not be finite. The gradient of weight has the product of the token and
      // its gradient 0.
      const Tensor ignored = target.slice(0, first, end).eq(options.ignore_index).unsqueeze(1);
      const Tensor rows = input.slice(0, first, end).masked_fill(ignored, 0);
      const Tensor products = precise_mm(rows, weight.t());
      body(first, products);
      if (needs(0)) gradients[0].slice(0, first, end).copy_(precise_mm(products, weight));
      // A sum over many tokens can overflow float16.
      if (needs(1)) gradients[1].add_(accumulated_mm(products.t(), rows));
      if (needs(2)) gradients[2].add_(at::sum(products, 0, false, gradients[2].scalar_type()));
    }
  }

  ClassifierTensors tensors_;
};

}  // namespace

static void compute_losses(Cuda, const char*, const Classifier& classifier,
                           const LossOptions& options, const LinearCrossEntropyOutputs& outputs) {
  const auto& [loss, lse, gradients] = outputs;
  const BlockwiseCrossEntropy problem(classifier, options);
  const Tensor losses = options.reduces() ? empty_of(Cuda::empty, lse) : loss;
  problem.forward(losses, lse, gradients);
  if (options.reduces()) loss.copy_(at::sum(losses));
  if (options.reduction != "mean") return;
  const Tensor count = problem.num_targets();
  loss.div_(count);
  for (const Tensor& gradient : gradients) gradient.div_(count.clamp_min(1));
}

static void compute_gradients(Cuda, const char*, const Tensor& grad_loss,
                              const Classifier& classifier, const LossOptions& options,
                              const Tensor& lse, const std::vector<Tensor>& gradients) {
  // A backward pass under autocast would cast the inputs of torch's GEMMs to the autocast type.
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  const BlockwiseCrossEntropy problem(classifier, options);
  problem.backward(lse, options.reduces() ? Tensor() : grad_loss, gradients);
  if (!options.reduces()) return;
  Tensor factor = grad_loss;
  if (options.reduction == "mean") factor = grad_loss.div(problem.num_targets().clamp_min(1));
  for (const Tensor& gradient : gradients) gradient.mul_(factor);
}

static void scale_gradient(Cuda, const Tensor& kept, const Tensor& grad_loss,
                           const Tensor& gradient) {
  gradient.copy_(kept.mul(grad_loss));
}

}  // namespace moe_ext

TORCH_LIBRARY_IMPL(moe_ext, CUDA, m) { moe_ext::implement_linear_cross_entropy<moe_ext::Cuda>(m); }
