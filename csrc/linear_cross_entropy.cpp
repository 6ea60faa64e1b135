// The host functions of linear_cross_entropy on the CPU.
#include "linear_cross_entropy.h"

#include <vector>

#include "device.h"
#include "implement.h"
#include "kernels/linear_cross_entropy.h"

namespace moe_ext {
namespace {

// The arguments as kernels read them. Checks the values of the targets.
class ClassifierTensors {
 public:
  ClassifierTensors(const char* op, const Classifier& classifier, const LossOptions& options)
      : input_(classifier.input.contiguous()),
        weight_(classifier.weight.contiguous()),
        target_(contiguous_index(classifier.target)),
        options_(options),
        num_targets_(count_targets(op, target_, weight_.size(0), options.ignore_index)) {
    if (classifier.bias) bias_ = classifier.bias->to(accumulate_type(input_)).contiguous();
  }

  template <typename scalar_t>
  LinearClassifier<scalar_t> classifier() const {
    return {.input = input_.const_data_ptr<scalar_t>(),
            .weight = weight_.const_data_ptr<scalar_t>(),
            .target = target_.const_data_ptr<int64_t>(),
            .bias = data_of<acc_type<scalar_t>>(bias_),
            .num_tokens = input_.size(0),
            .width = input_.size(1),
            .num_classes = weight_.size(0),
            .ignore_index = options_.ignore_index,
            .label_smoothing = options_.label_smoothing,
            .z_loss = options_.z_loss,
            .softcap = options_.softcap};
  }

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
    return options_.reduction == "mean" ? static_cast<acc_t>(num_targets_) : acc_t(1);
  }

 private:
  Tensor input_, weight_, target_, bias_;
  const LossOptions& options_;
  int64_t num_targets_;  // that are not ignored
};

template <typename T>
T* data_or_null(const Tensor& gradient) {
  return gradient.numel() > 0 ? gradient.mutable_data_ptr<T>() : nullptr;
}

template <typename Device>
LinearCrossEntropyOutputs linear_cross_entropy(const Classifier& classifier,
                                               const LossOptions& options,
                                               const c10::List<bool>& keep_gradients) {
  constexpr auto op = "linear_cross_entropy";
  check_linear_cross_entropy(op, classifier, options, "keep_gradients", keep_gradients);
  auto outputs = linear_cross_entropy_outputs(Device::empty, classifier, options, keep_gradients);
  const Tensor& loss = std::get<0>(outputs);
  const Tensor& lse = std::get<1>(outputs);
  const auto& gradients = std::get<2>(outputs);
  Device::compute(classifier.input, [&] {
    const ClassifierTensors tensors(op, classifier, options);
    const Tensor losses = options.reduces() ? empty_of(Device::empty, lse) : loss;
    if (lse.numel() == 0) {
      for (const Tensor& gradient : gradients) gradient.zero_();
    }
    with_type(classifier.input, [&]<typename scalar_t>() {
      using acc_t = acc_type<scalar_t>;
      const acc_t one = 1;
      const auto grad =
          options.reduces() ? tensors.template grad_of_tokens<acc_t>(&one) : std::vector<acc_t>();
      auto* total = options.reduces() ? loss.template mutable_data_ptr<acc_t>() : nullptr;
      Device::run(
          LinearCrossEntropy<scalar_t>{.classifier = tensors.template classifier<scalar_t>(),
                                       .losses = losses.mutable_data_ptr<acc_t>(),
                                       .loss = total,
                                       .new_lse = lse.template mutable_data_ptr<acc_t>(),
                                       .lse = lse.template mutable_data_ptr<acc_t>(),
                                       .grad = grad.data(),
                                       .grad_input = data_or_null<acc_t>(gradients[0]),
                                       .grad_weight = data_or_null<acc_t>(gradients[1]),
                                       .grad_bias = data_or_null<acc_t>(gradients[2])});
      if (total != nullptr) *total /= tensors.template divisor<acc_t>();
    });
  });
  return outputs;
}

template <typename Device>
std::vector<Tensor> linear_cross_entropy_backward(const Tensor& grad_loss,
                                                  const Classifier& classifier,
                                                  const LossOptions& options, const Tensor& lse,
                                                  at::TensorList gradients,
                                                  const c10::List<bool>& needs) {
  constexpr auto op = "_linear_cross_entropy_backward";
  check_linear_cross_entropy_backward(grad_loss, classifier, options, lse, gradients, needs);
  const bool is_kept = !gradients.empty();
  const auto type = is_kept ? std::nullopt : std::optional(lse.scalar_type());
  std::vector<Tensor> results =
      linear_cross_entropy_gradients(Device::empty, classifier, needs, type);
  Device::compute(classifier.input, [&] {
    const Tensor grads = grad_loss.contiguous();
    if (is_kept) {
      for (size_t i = 0; i < results.size(); ++i) {
        if (results[i].numel() == 0) continue;
        const Tensor kept = gradients[i].contiguous();
        with_type(results[i], [&]<typename scalar_t>() {
          using acc_t = acc_type<scalar_t>;
          Device::run(ScaledCopy<scalar_t>{.scale = *grads.const_data_ptr<acc_t>(),
                                           .from = kept.const_data_ptr<acc_t>(),
                                           .size = kept.numel(),
                                           .to = results[i].mutable_data_ptr<scalar_t>()});
        });
      }
      return;
    }
    const ClassifierTensors tensors(op, classifier, options);
    const Tensor log_sums = lse.contiguous();
    if (lse.numel() == 0) {
      for (const Tensor& result : results) result.zero_();
    }
    with_type(classifier.input, [&]<typename scalar_t>() {
      using acc_t = acc_type<scalar_t>;
      const auto grad = tensors.template grad_of_tokens<acc_t>(grads.const_data_ptr<acc_t>());
      Device::run(
          LinearCrossEntropy<scalar_t>{.classifier = tensors.template classifier<scalar_t>(),
                                       .losses = nullptr,
                                       .loss = nullptr,
                                       .new_lse = nullptr,
                                       .lse = log_sums.const_data_ptr<acc_t>(),
                                       .grad = grad.data(),
                                       .grad_input = data_or_null<acc_t>(results[0]),
                                       .grad_weight = data_or_null<acc_t>(results[1]),
                                       .grad_bias = data_or_null<acc_t>(results[2])});
    });
  });
  if (!is_kept) convert_gradients(classifier, results);
  return results;
}

template <typename Device>
void implement_linear_cross_entropy(torch::Library& m) {
  implement<"linear_cross_entropy", &linear_cross_entropy_of<linear_cross_entropy<Device>>>(m);
  implement<"_linear_cross_entropy_backward",
            &linear_cross_entropy_backward_of<linear_cross_entropy_backward<Device>>>(m);
}

}  // namespace
}  // namespace moe_ext

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) { moe_ext::implement_linear_cross_entropy<moe_ext::Cpu>(m); }
TORCH_LIBRARY_IMPL(moe_ext, Meta, m) { moe_ext::implement_linear_cross_entropy<moe_ext::Meta>(m); }
