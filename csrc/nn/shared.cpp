// The shared expert of a layer, which processes every token (arXiv 2401.06066).
#include <moe_ext/nn.h>
#include <moe_ext/ops.h>
#include <torch/nn/init.h>

#include <ostream>
#include <utility>

#include "checks.h"
#include "logits.h"

namespace moe_ext::nn {

SharedExpertOptions::SharedExpertOptions(int64_t d_model, std::vector<int64_t> hidden_sizes)
    : d_model_(d_model), hidden_sizes_(std::move(hidden_sizes)) {}

SharedExpertImpl::SharedExpertImpl(const SharedExpertOptions& options) : options(options) {
  reset();
}

void SharedExpertImpl::reset() {
  expert =
      register_module("expert", FeedForwardExperts(FeedForwardExpertsOptions(1, options.d_model())
                                                       .hidden_sizes(options.hidden_sizes())
                                                       .activation(options.activation())
                                                       .activation_args(options.activation_args())
                                                       .bias(options.bias())
                                                       .d_output(options.d_output())
                                                       .dtype(options.dtype())));
  if (options.gated()) {
    w_gate = register_parameter("w_gate", torch::zeros({options.d_model(), 1}));
  }
}

void SharedExpertImpl::reset_parameters() {
  expert->reset_parameters();
  if (w_gate.defined()) torch::nn::init::zeros_(w_gate);
}

void SharedExpertImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "moe_ext::nn::SharedExpert(gated=" << options.gated()
         << ", recompute=" << options.recompute() << ")";
}

Tensor SharedExpertImpl::forward(const Tensor& x) {
  require_tokens("SharedExpert", x, options.d_model());
  if (!w_gate.defined()) return expert->forward_fused(x, {.recompute = options.recompute()});
  const auto row = at::arange(x.size(0), x.options().dtype(at::kLong)).unsqueeze(1);
  // torch's sigmoid rounds differently at the end of a tensor, so that the output of a token would
  // not be bitwise identical for another number of tokens.
  const auto gates =
      ops::topk_routing(logits(x, w_gate), 1, {}, "sigmoid", /*renormalize=*/false).gates;
  return expert->forward_fused(x,
                               {.inverse = row, .gates = gates, .recompute = options.recompute()});
}

}  // namespace moe_ext::nn
