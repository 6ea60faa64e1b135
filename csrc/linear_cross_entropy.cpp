// The cross-entropy of a linear layer on the CPU.
#include "linear_cross_entropy.h"

#include <vector>

namespace moe_ext {
namespace {

// The targets that are not ignored.
class Targets {
 public:
  // Checks the values.
  Targets(const char* op, const ClassifierTensors& tensors, const LossOptions& options)
      : target_(tensors.target),
        options_(options),
        count_(count_targets(op, target_, tensors.weight.size(0), options.ignore_index)) {}

  // Returns dL/dloss of each token for the gradient of the loss: one number, or one for each token
  // if the losses are not reduced.
  template <typename acc_t>
  std::vector<acc_t> grad_of_tokens(const acc_t* grad_loss) const {
    const auto* target = target_.const_data_ptr<int64_t>();
    std::vector<acc_t> grad(target_.numel());
    for (size_t t = 0; t < grad.size(); ++t) {
      if (target[t] == options_.ignore_index) continue;
      grad[t] = grad_loss[options_.reduces() ? 0 : t] / divisor<acc_t>();
    }
    return grad;
  }

  // The number by which the sum of the losses is divided.
  template <typename acc_t>
  acc_t divisor() const {
    return options_.reduction == "mean" ? static_cast<acc_t>(count_) : acc_t(1);
  }

 private:
  const Tensor& target_;
  const LossOptions& options_;
  int64_t count_;
};

template <typename T>
T* data_or_null(const Tensor& gradient) {
  return gradient.numel() > 0 ? gradient.mutable_data_ptr<T>() : nullptr;
}

// The kernel does not run without tokens.
void write_zeros(const Classifier& classifier, const std::vector<Tensor>& gradients) {
  if (classifier.input.size(0) > 0) return;
  for (const Tensor& gradient : gradients) gradient.zero_();
}

}  // namespace

static void compute_losses(Cpu, const char* op, const Classifier& classifier,
                           const LossOptions& options, const LinearCrossEntropyOutputs& outputs) {
  const auto& [loss, lse, gradients] = outputs;
  const ClassifierTensors tensors(classifier, options);
  const Targets targets(op, tensors, options);
  const Tensor losses = options.reduces() ? empty_of(Cpu::empty, lse) : loss;
  write_zeros(classifier, gradients);
  with_type(classifier.input, [&]<typename scalar_t>() {
    using acc_t = acc_type<scalar_t>;
    const acc_t one = 1;
    const auto grad =
        options.reduces() ? targets.template grad_of_tokens<acc_t>(&one) : std::vector<acc_t>();
    auto* total = options.reduces() ? loss.template mutable_data_ptr<acc_t>() : nullptr;
    Cpu::run(LinearCrossEntropy<scalar_t>{.classifier = tensors.template classifier<scalar_t>(),
                                          .losses = losses.mutable_data_ptr<acc_t>(),
                                          .loss = total,
                                          .new_lse = lse.template mutable_data_ptr<acc_t>(),
                                          .lse = lse.template mutable_data_ptr<acc_t>(),
                                          .grad = grad.data(),
                                          .grad_input = data_or_null<acc_t>(gradients[0]),
                                          .grad_weight = data_or_null<acc_t>(gradients[1]),
                                          .grad_bias = data_or_null<acc_t>(gradients[2])});
    if (total != nullptr) *total /= targets.template divisor<acc_t>();
  });
}

static void compute_gradients(Cpu, const char* op, const Tensor& grad_loss,
                              const Classifier& classifier, const LossOptions& options,
                              const Tensor& lse, const std::vector<Tensor>& gradients) {
  const ClassifierTensors tensors(classifier, options);
  const Targets targets(op, tensors, options);
  write_zeros(classifier, gradients);
  with_type(classifier.input, [&]<typename scalar_t>() {
    using acc_t = acc_type<scalar_t>;
    const auto grad = targets.template grad_of_tokens<acc_t>(grad_loss.const_data_ptr<acc_t>());
    Cpu::run(LinearCrossEntropy<scalar_t>{.classifier = tensors.template classifier<scalar_t>(),
                                          .losses = nullptr,
                                          .loss = nullptr,
                                          .new_lse = nullptr,
                                          .lse = lse.const_data_ptr<acc_t>(),
                                          .grad = grad.data(),
                                          .grad_input = data_or_null<acc_t>(gradients[0]),
                                          .grad_weight = data_or_null<acc_t>(gradients[1]),
                                          .grad_bias = data_or_null<acc_t>(gradients[2])});
  });
}

static void scale_gradient(Cpu, const Tensor& kept, const Tensor& grad_loss,
                           const Tensor& gradient) {
  const Tensor source = kept.contiguous();
  with_type(gradient, [&]<typename scalar_t>() {
    using acc_t = acc_type<scalar_t>;
    Cpu::run(ScaledCopy<scalar_t>{.scale = *grad_loss.const_data_ptr<acc_t>(),
                                  .from = source.const_data_ptr<acc_t>(),
                                  .size = source.numel(),
                                  .to = gradient.mutable_data_ptr<scalar_t>()});
  });
}

}  // namespace moe_ext

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) { moe_ext::implement_linear_cross_entropy<moe_ext::Cpu>(m); }
TORCH_LIBRARY_IMPL(moe_ext, Meta, m) { moe_ext::implement_linear_cross_entropy<moe_ext::Meta>(m); }
