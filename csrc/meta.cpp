// Meta kernels: the shapes and types of the outputs, for torch.compile, export and the meta device.
#include <torch/library.h>

#include <tuple>

#include "experts.h"
#include "linear_cross_entropy.h"
#include "lstm.h"

namespace moe_ext {
namespace {

ExpertsOutputs experts_meta(const Tensor& x, const Routing& routing, const FeedForward& network,
                            bool keep_hidden) {
  check_experts(network.op(), x, routing, network);
  return {experts_output(empty, x, routing, network),
          experts_hidden(empty, x, routing, network, keep_hidden)};
}

ExpertsGradients experts_backward_meta(const Tensor& grad_y, const Tensor& x,
                                       const Routing& routing, const FeedForward& network,
                                       at::TensorList hidden, bool needs_x,
                                       const c10::List<bool>& needs_parameters) {
  check_experts_backward(grad_y, x, routing, network, hidden, needs_parameters);
  return {experts_gradient_of_x(empty, x, needs_x),
          experts_gradient_of_gates(empty, x, routing.gates),
          experts_gradients_of(empty, network, needs_parameters)};
}

LinearCrossEntropyOutputs linear_cross_entropy_meta(const Classifier& classifier,
                                                    const LossOptions& options,
                                                    const c10::List<bool>& keep_gradients) {
  check_linear_cross_entropy("linear_cross_entropy", classifier, options, "keep_gradients",
                             keep_gradients);
  return linear_cross_entropy_outputs(empty, classifier, options, keep_gradients);
}

std::vector<Tensor> linear_cross_entropy_backward_meta(const Tensor& grad_loss,
                                                       const Classifier& classifier,
                                                       const LossOptions& options,
                                                       const Tensor& lse, at::TensorList gradients,
                                                       const c10::List<bool>& needs) {
  check_linear_cross_entropy_backward(grad_loss, classifier, options, lse, gradients, needs);
  return linear_cross_entropy_gradients(empty, classifier, needs);
}

LstmOutputs lstm_meta(const Lstm& lstm) {
  check_lstm("lstm", lstm);
  return lstm_outputs(empty, lstm);
}

std::vector<Tensor> lstm_backward_meta(const LstmOutputGradients& gradients, const Lstm& lstm,
                                       const LstmSaved& saved, const c10::List<bool>& needs) {
  check_lstm_backward(gradients, lstm, saved, needs);
  return lstm_gradients(empty, lstm, needs);
}

}  // namespace
}  // namespace moe_ext

TORCH_LIBRARY_IMPL(moe_ext, Meta, m) {
  m.impl("experts", &moe_ext::experts_of<moe_ext::experts_meta>);
  m.impl("_experts_backward", &moe_ext::experts_backward_of<moe_ext::experts_backward_meta>);
  m.impl("linear_cross_entropy",
         &moe_ext::linear_cross_entropy_of<moe_ext::linear_cross_entropy_meta>);
  m.impl("_linear_cross_entropy_backward",
         &moe_ext::linear_cross_entropy_backward_of<moe_ext::linear_cross_entropy_backward_meta>);
  m.impl("lstm", &moe_ext::lstm_of<moe_ext::lstm_meta>);
  m.impl("_lstm_backward", &moe_ext::lstm_backward_of<moe_ext::lstm_backward_meta>);
}
