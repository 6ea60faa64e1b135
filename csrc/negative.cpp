// Tensors with torch's negative or conjugate bit: views such as z.conj().imag, whose memory holds
// -x.
//
// Torch's fallback copies such a tensor before anything has checked its memory. It does not handle
// operators that return nothing.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstring>

#include "factored.h"
#include "implement.h"

namespace moe_ext {
namespace {

constexpr const char* kPureOperators[] = {"noisy_topk_gating",
                                          "_noisy_topk_gating_backward",
                                          "topk_routing",
                                          "_topk_routing_backward",
                                          "load",
                                          "_load_backward",
                                          "batchwise_topm",
                                          "selected_softmax",
                                          "_selected_softmax_backward",
                                          "importance",
                                          "importance_and_load",
                                          "weighted_cv_squared",
                                          "_weighted_cv_squared_backward",
                                          "dispatch_plan",
                                          "dispatch",
                                          "_dispatch_backward",
                                          "_empty_rows",
                                          "combine",
                                          "_combine_backward",
                                          "experts",
                                          "_experts_backward",
                                          "_logits",
                                          "linear_cross_entropy",
                                          "_linear_cross_entropy_backward",
                                          "lstm",
                                          "_lstm_backward",
                                          "lstm_cell",
                                          "_lstm_cell_backward"};

// Calls the operator with copies that have neither bit.
void resolve(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto of_operator = std::string_view(schema.name()).substr(std::strlen("moe_ext::"));
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto resolved = [&](const Tensor& tensor, const std::string& place = "") {
      check_memory(of_operator, tensor, [&] { return arguments[i].name() + place; });
      return tensor.defined() ? tensor.resolve_conj().resolve_neg() : tensor;
    };
    auto& input = (*stack)[stack->size() - arguments.size() + i];
    if (input.isTensor()) {
      input = resolved(input.toTensor());
    } else if (input.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : input.toTensorVector()) {
        list.push_back(resolved(each, c10::str("[", list.size(), "]")));
      }
      input = std::move(list);
    }
  }
  op.callBoxed(stack);
}

// Runs the step on copies without the negative bit, then writes the results back.
void factored_step_of_copies(Tensor& param, const Tensor& grad, Tensor& row, Tensor& column,
                             const Tensor& lr, const Tensor& correction, double decay, double gain,
                             double eps, bool mean_of_roots) {
  // Checked here because a copy never has elements that share memory.
  check_factored_step(param, grad, row, column, lr, correction, decay, gain, eps);
  static const auto op =
      find_operator<decltype(factored_step_of_copies)>("moe_ext::factored_step_");
  Tensor p = param.resolve_neg(), r = row.resolve_neg(), c = column.resolve_neg();
  op.call(p, grad.resolve_neg(), r, c, lr.resolve_neg(), correction.resolve_neg(), decay, gain, eps,
          mean_of_roots);
  if (!p.is_same(param)) param.copy_(p);
  if (!r.is_same(row)) row.copy_(r);
  if (!c.is_same(column)) column.copy_(c);
}

void register_pure(torch::Library& m) {
  for (const auto* name : kPureOperators) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&resolve>());
  }
}

}  // namespace
}  // namespace moe_ext

TORCH_LIBRARY_IMPL(moe_ext, Negative, m) {
  moe_ext::register_pure(m);
  moe_ext::implement<"factored_step_", &moe_ext::factored_step_of_copies>(m);
}

// No operator takes complex numbers: the kernel refuses the copy.
TORCH_LIBRARY_IMPL(moe_ext, Conjugate, m) {
  moe_ext::register_pure(m);
  for (const auto* name : {"factored_step_", "_count_tokens_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&moe_ext::resolve>());
  }
}
