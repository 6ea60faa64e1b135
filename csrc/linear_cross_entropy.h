// linear_cross_entropy: the checks of its arguments, its outputs, and the host functions.
#pragma once

#include <cmath>
#include <vector>

#include "checks.h"
#include "device.h"
#include "implement.h"
#include "kernels/linear_cross_entropy.h"
#include "linear_cross_entropy_arguments.h"

namespace moe_ext {

inline void check_linear_cross_entropy(const char* op, const Classifier& classifier,
                                       const LossOptions& options, const char* flags_name,
                                       const c10::List<bool>& flags) {
  const auto& [input, weight, target, bias] = classifier;
  check_dim(op, "input", input, 2);
  check_floating(op, "input", input);
  check_dim(op, "linear_weight", weight, 2);
  const auto type = input.scalar_type();
  const auto num_classes = classifier.num_classes();
  check_argument(op, "linear_weight", weight, input, type, {num_classes, input.sym_size(1)});
  check_index(op, "target", target, input, {classifier.num_tokens()});
  if (bias) {
    // Only sums use the bias, so it may be more precise than half-precision weights.
    const bool wide = bias->scalar_type() == accumulate_type(input);
    check_argument(op, "linear_bias", *bias, input, wide ? bias->scalar_type() : type,
                   {num_classes});
  }
  TORCH_CHECK_VALUE(num_classes >= 1, op, ": linear_weight must have at least 1 row, got ",
                    num_classes);
  const auto& [reduction, ignore_index, label_smoothing, z_loss, softcap] = options;
  TORCH_CHECK_VALUE(reduction == "none" || reduction == "mean" || reduction == "sum", op,
                    ": reduction must be none, mean or sum, got '", reduction, "'");
  TORCH_CHECK_VALUE(label_smoothing >= 0 && label_smoothing <= 1, op,
                    ": label_smoothing must be between 0 and 1, got ", label_smoothing);
  TORCH_CHECK_VALUE(z_loss >= 0 && std::isfinite(in_accumulate_type(input, z_loss)), op,
                    ": z_loss must be at least 0, and finite in the dtype of the loss, got ",
                    z_loss);
  if (softcap) {
    const double in_type = in_accumulate_type(input, *softcap);
    TORCH_CHECK_VALUE(in_type > 0 && std::isfinite(in_type), op,
                      ": softcap must be above 0, and finite in the dtype of the loss, got ",
                      *softcap);
  }
  TORCH_CHECK_VALUE(flags.size() == 3, op, ": ", flags_name,
                    " must have a value for input, linear_weight and linear_bias, got ",
                    flags.size(), " values");
}

// Checks the values of contiguous int64 CPU targets; returns the number of targets that are not
// ignored.
inline int64_t count_targets(const char* op, const Tensor& target, int64_t num_classes,
                             int64_t ignore_index) {
  const at::IntArrayRef targets(target.const_data_ptr<int64_t>(), target.numel());
  int64_t count = 0;
  for (const int64_t y : targets) {
    if (y == ignore_index) continue;
    TORCH_CHECK_INDEX(y >= 0 && y < num_classes, op, ": target must be at least 0 and below ",
                      num_classes, ", or ignore_index = ", ignore_index, ", got ", y);
    ++count;
  }
  return count;
}

// Creates the gradients of input, weight and bias in `type`, or in the types of these tensors. A
// gradient has shape [0] if it is not needed or there is no bias.
inline std::vector<Tensor> linear_cross_entropy_gradients(
    Empty& empty, const Classifier& classifier, const c10::List<bool>& needs,
    std::optional<at::ScalarType> type = std::nullopt) {
  std::vector<Tensor> gradients;
  const Tensor& input = classifier.input;
  const auto add = [&](const Tensor* of) {
    const bool needed = of != nullptr && needs[gradients.size()];
    const auto type_of = type.value_or((of != nullptr ? *of : input).scalar_type());
    gradients.push_back(empty(input, needed ? of->sym_sizes() : c10::SymIntArrayRef({0}), type_of));
  };
  add(&input);
  add(&classifier.weight);
  add(classifier.bias ? &*classifier.bias : nullptr);
  return gradients;
}

// Converts the gradients of input, weight and bias to the types of these tensors.
inline void convert_gradients(const Classifier& classifier, std::vector<Tensor>& gradients) {
  const Tensor& input = classifier.input;
  for (size_t i : {0, 1}) gradients[i] = gradients[i].to(input.scalar_type());
  gradients[2] = gradients[2].to(classifier.bias.value_or(input).scalar_type());
}

inline c10::SymDimVector loss_shape(const Classifier& classifier, const LossOptions& options) {
  if (options.reduces()) return {};
  return {classifier.num_tokens()};
}

// The gradients are kept only if the loss is reduced: they are then known but for a factor.
inline c10::List<bool> kept_gradients(const LossOptions& options,
                                      const c10::List<bool>& keep_gradients) {
  if (options.reduces()) return keep_gradients;
  return c10::List<bool>({false, false, false});
}

// The results have the accumulation type; the kept gradients, too, because a sum over the tokens
// can overflow a half-precision type before backward scales it.
inline LinearCrossEntropyOutputs linear_cross_entropy_outputs(
    Empty& empty, const Classifier& classifier, const LossOptions& options,
    const c10::List<bool>& keep_gradients) {
  const auto type = accumulate_type(classifier.input);
  return {empty(classifier.input, loss_shape(classifier, options), type),
          empty(classifier.input, {classifier.num_tokens()}, type),
          linear_cross_entropy_gradients(empty, classifier, kept_gradients(options, keep_gradients),
                                         type)};
}

inline void check_linear_cross_entropy_backward(const Tensor& grad_loss,
                                                const Classifier& classifier,
                                                const LossOptions& options, const Tensor& lse,
                                                at::TensorList gradients,
                                                const c10::List<bool>& needs) {
  constexpr auto op = "_linear_cross_entropy_backward";
  check_linear_cross_entropy(op, classifier, options, "needs", needs);
  const auto& input = classifier.input;
  const auto type = accumulate_type(input);
  check_argument(op, "grad_loss", grad_loss, input, type, loss_shape(classifier, options));
  check_argument(op, "lse", lse, input, type, {classifier.num_tokens()});
  if (gradients.empty()) return;  // they are recomputed
  TORCH_CHECK_VALUE(gradients.size() == 3, op, ": gradients must have 3 tensors or none, got ",
                    gradients.size());
  const auto check = [&](size_t i, c10::SymIntArrayRef shape) {
    if (needs[i]) check_argument(op, "gradients", gradients[i], input, type, shape);
  };
  check(0, input.sym_sizes());
  check(1, classifier.weight.sym_sizes());
  if (classifier.bias) check(2, classifier.bias->sym_sizes());
}

// The arguments as kernels read them.
struct ClassifierTensors {
  ClassifierTensors(const Classifier& classifier, const LossOptions& options)
      : input(classifier.input.contiguous()),
        weight(classifier.weight.contiguous()),
        target(contiguous_index(classifier.target)),
        options(options) {
    if (classifier.bias) bias = classifier.bias->to(accumulate_type(input)).contiguous();
  }

  template <typename scalar_t>
  LinearClassifier<scalar_t> classifier() const {
    return {.input = input.const_data_ptr<scalar_t>(),
            .weight = weight.const_data_ptr<scalar_t>(),
            .target = target.const_data_ptr<int64_t>(),
            .bias = data_of<acc_type<scalar_t>>(bias),
            .num_tokens = input.size(0),
            .width = input.size(1),
            .num_classes = weight.size(0),
            .ignore_index = options.ignore_index,
            .label_smoothing = options.label_smoothing,
            .z_loss = options.z_loss,
            .softcap = options.softcap};
  }

  Tensor input, weight, target, bias;
  const LossOptions& options;
};

// What the devices do in their own ways: linear_cross_entropy.cpp is for the CPU, and
// cuda_host/linear_cross_entropy.cpp for CUDA.
//
// compute_losses(device, op, classifier, options, outputs)
// compute_gradients(device, op, grad_loss, classifier, options, lse, gradients), in the type of lse
// scale_gradient(device, kept, grad_loss, gradient): gradient = grad_loss kept

inline void compute_losses(Meta, const char*, const Classifier&, const LossOptions&,
                           const LinearCrossEntropyOutputs&) {}
inline void compute_gradients(Meta, const char*, const Tensor&, const Classifier&,
                              const LossOptions&, const Tensor&, const std::vector<Tensor>&) {}
inline void scale_gradient(Meta, const Tensor&, const Tensor&, const Tensor&) {}

template <typename Device>
LinearCrossEntropyOutputs linear_cross_entropy(const Classifier& classifier,
                                               const LossOptions& options,
                                               const c10::List<bool>& keep_gradients) {
  constexpr auto op = "linear_cross_entropy";
  check_linear_cross_entropy(op, classifier, options, "keep_gradients", keep_gradients);
  auto outputs = linear_cross_entropy_outputs(Device::empty, classifier, options, keep_gradients);
  Device::compute(classifier.input,
                  [&] { compute_losses(Device(), op, classifier, options, outputs); });
  return outputs;
}

template <typename Device>
std::vector<Tensor> linear_cross_entropy_backward(const Tensor& grad_loss,
                                                  const Classifier& classifier,
                                                  const LossOptions& options, const Tensor& lse,
                                                  at::TensorList kept,
                                                  const c10::List<bool>& needs) {
  constexpr auto op = "_linear_cross_entropy_backward";
  check_linear_cross_entropy_backward(grad_loss, classifier, options, lse, kept, needs);
  const auto type = kept.empty() ? std::optional(lse.scalar_type()) : std::nullopt;
  auto gradients = linear_cross_entropy_gradients(Device::empty, classifier, needs, type);
  Device::compute(classifier.input, [&] {
    const Tensor grad = grad_loss.contiguous();
    if (kept.empty()) {
      compute_gradients(Device(), op, grad, classifier, options, lse.contiguous(), gradients);
    }
    for (size_t i = 0; i < kept.size(); ++i) {
      if (gradients[i].numel() > 0) scale_gradient(Device(), kept[i], grad, gradients[i]);
    }
  });
  if (kept.empty()) convert_gradients(classifier, gradients);
  return gradients;
}

template <typename Device>
void implement_linear_cross_entropy(torch::Library& m) {
  implement<"linear_cross_entropy", &linear_cross_entropy_of<linear_cross_entropy<Device>>>(m);
  implement<"_linear_cross_entropy_backward",
            &linear_cross_entropy_backward_of<linear_cross_entropy_backward<Device>>>(m);
}

}  // namespace moe_ext
