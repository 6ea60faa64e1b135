// An LSTM on CUDA. A step has one GEMM of torch, the elementwise kernel of lstm_cell, and one more
// GEMM if there is a projection.
//
// cuDNN's LSTM, which torch.nn.LSTM calls, has m_t = projection r_t only for P < U. For sentences
// of different lengths, torch needs the lengths on the host, which waits for the device. What cuDNN
// saves for the backward pass is not the gates and cells that the operator returns.
#include "../lstm.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <vector>

#include "../device.h"
#include "../implement.h"
#include "../kernels/lstm_cell.h"
#include "mm.h"

namespace moe_ext {
namespace {

// The arguments in the order of the steps. A sentence's steps are its tokens, in reverse order if
// `reverse`, and then its padding, whose results have no effect.
class LstmOnCuda {
 public:
  explicit LstmOnCuda(const Lstm& lstm)
      : lstm_(lstm),
        num_steps_(lstm.x.size(1)),
        num_sentences_(lstm.x.size(0)),
        num_units_(lstm.weight_input.size(0) / 4) {
    const auto options = lstm.x.options().dtype(at::kLong);
    // The host cannot check the lengths without waiting for the device.
    lengths_ = (lstm.lengths ? lstm.lengths->to(at::kLong).clamp(0, num_steps_)
                             : at::full({num_sentences_}, num_steps_, options))
                   .unsqueeze(1);
    const Tensor steps = at::arange(num_steps_, options);
    is_padding_ = steps.ge(lengths_).unsqueeze(2);
    token_of_step_ =
        (lstm.reverse ? lengths_.sub(1).sub(steps).clamp_min(0) : steps.unsqueeze(0)).unsqueeze(2);
  }

  int64_t num_steps() const { return num_steps_; }

  // Returns values [B, S, W] as [S, B, W]; the padding is zero.
  Tensor by_step(const Tensor& values) const {
    return (reorders() ? reordered(values) : values).transpose(0, 1).contiguous();
  }
  // The inverse.
  Tensor by_token(const Tensor& values) const {
    const Tensor tokens = values.transpose(0, 1);
    return reorders() ? reordered(tokens).contiguous() : tokens.clone(at::MemoryFormat::Contiguous);
  }

  // Returns values [S, B, W] with zeros in the padding: what is not finite there must not reach a
  // gradient.
  Tensor without_padding(const Tensor& values) const {
    return lstm_.lengths ? values.masked_fill(is_padding_.transpose(0, 1), 0) : values;
  }

  // Does the same in place for the values [B, W] of one step.
  void clear_padding(const Tensor& values, int64_t step) const {
    if (lstm_.lengths) values.masked_fill_(is_padding_.select(1, step), 0);
  }

  // Returns m_0 and c_0 as states are computed.
  Tensor first_m() const { return or_zeros(lstm_.m_0, lstm_.width().expect_int(), type()); }
  Tensor first_c() const { return or_zeros(lstm_.c_0, num_units_, acc_type()); }

  // Returns the state after the last token of each sentence: `first` [B, W], or one of the states
  // [S, B, W] after the steps.
  Tensor last(const Tensor& first, const Tensor& states) const {
    const Tensor index = lengths_.unsqueeze(0).expand({1, num_sentences_, first.size(1)});
    return at::cat({first.unsqueeze(0), states}).gather(0, index).squeeze(0);
  }
  // The derivative of `last` by the states: adds the gradient to gradients [S, B, W].
  void add_to_last(const Tensor& gradients, const Tensor& gradient) const {
    const Tensor steps = at::arange(1, num_steps_ + 1, lengths_.options());
    const Tensor is_last = steps.view({-1, 1, 1}).eq(lengths_);
    Tensor(gradients).add_(gradient.unsqueeze(0).masked_fill(is_last.logical_not(), 0));
  }
  // The derivative of `last` by `first`.
  Tensor gradient_of_first(const Tensor& gradient) const {
    return gradient.masked_fill(lengths_.gt(0), 0);
  }

  // Returns the gates of all steps before their activations, without the recurrent part.
  Tensor gates_of_inputs(const Tensor& inputs) const {
    const Tensor gates = accumulated_mm(inputs.flatten(0, 1), lstm_.weight_input.t());
    if (lstm_.bias) gates.add_(*lstm_.bias);
    return gates.view({num_steps_, num_sentences_, 4 * num_units_});
  }

  // Computes the cells of some rows, all in the accumulate type: c and r = sigmoid(o) tanh(c).
  void compute_cells(const Tensor& gates, const Tensor& previous_c, const Tensor& c,
                     const Tensor& r) const {
    with_acc_type([&]<typename acc_t>() {
      Cuda::run(LstmCell<acc_t>{.gates = gates.const_data_ptr<acc_t>(),
                                .c_0 = previous_c.const_data_ptr<acc_t>(),
                                .num_rows = gates.size(0),
                                .num_units = num_units_,
                                .h = r.mutable_data_ptr<acc_t>(),
                                .c = c.mutable_data_ptr<acc_t>()});
    });
  }
  void differentiate_cells(const Tensor& grad_r, const Tensor& grad_c, const Tensor& gates,
                           const Tensor& previous_c, const Tensor& grad_gates,
                           const Tensor& grad_previous_c) const {
    with_acc_type([&]<typename acc_t>() {
      Cuda::run(LstmCellBackward<acc_t>{.grad_h = grad_r.const_data_ptr<acc_t>(),
                                        .grad_c = grad_c.const_data_ptr<acc_t>(),
                                        .gates = gates.const_data_ptr<acc_t>(),
                                        .c_0 = previous_c.const_data_ptr<acc_t>(),
                                        .num_rows = num_sentences_,
                                        .num_units = num_units_,
                                        .grad_gates = grad_gates.mutable_data_ptr<acc_t>(),
                                        .grad_c_0 = grad_previous_c.mutable_data_ptr<acc_t>()});
    });
  }

  // Returns an uninitialized tensor [S, B, width].
  Tensor for_steps(int64_t width, at::ScalarType type) const {
    return at::empty({num_steps_, num_sentences_, width}, lstm_.x.options().dtype(type));
  }

  at::ScalarType type() const { return lstm_.x.scalar_type(); }
  at::ScalarType acc_type() const { return accumulate_type(lstm_.x); }

 private:
  // Whether the steps of a sentence are not just its tokens.
  bool reorders() const { return lstm_.lengths || lstm_.reverse; }
  Tensor reordered(const Tensor& values) const {
    return values.gather(1, token_of_step_.expand(values.sizes())).masked_fill(is_padding_, 0);
  }

  Tensor or_zeros(const OptionalTensor& state, int64_t width, at::ScalarType type) const {
    return state ? state->to(type).contiguous()
                 : at::zeros({num_sentences_, width}, lstm_.x.options().dtype(type));
  }

  template <typename Body>
  void with_acc_type(const Body& body) const {
    acc_type() == at::kDouble ? body.template operator()<double>()
                              : body.template operator()<float>();
  }

  const Lstm& lstm_;
  int64_t num_steps_, num_sentences_, num_units_;
  Tensor lengths_;        // [B, 1]
  Tensor is_padding_;     // [B, S, 1]
  Tensor token_of_step_;  // [B or 1, S, 1]
};

// Saves the gates before their activations, and the cells, in the order of the steps.
LstmOutputs lstm_cuda(const Lstm& lstm) {
  check_lstm("lstm", lstm);
  const c10::OptionalDeviceGuard guard(lstm.x.device());
  const LstmOnCuda problem(lstm);
  const int64_t num_units = lstm.weight_input.size(0) / 4;
  const Tensor gates = problem.gates_of_inputs(problem.by_step(lstm.x));
  const Tensor cells = problem.for_steps(num_units, problem.acc_type());
  const Tensor outputs = problem.for_steps(lstm.weight_recurrent.size(1), problem.type());
  const Tensor r = at::empty({lstm.x.size(0), num_units}, cells.options());
  const Tensor m_0 = problem.first_m(), c_0 = problem.first_c();
  Tensor m = m_0, c = c_0;
  for (int64_t s = 0; s < problem.num_steps(); ++s) {
    add_mm(gates[s], m, lstm.weight_recurrent.t());
    problem.compute_cells(gates[s], c, cells[s], r);
    c = cells[s];
    m = outputs[s];
    if (lstm.projection) {
      write_mm(m, r.to(problem.type()), lstm.projection->t());
    } else {
      m.copy_(r);
    }
  }
  const auto shaped = [&](const Tensor& saved) {
    return saved.view({lstm.x.size(0), lstm.x.size(1), saved.size(2)});
  };
  return {problem.by_token(outputs), problem.last(m_0, outputs),
          problem.last(c_0, cells).to(problem.type()), shaped(gates), shaped(cells)};
}

std::vector<Tensor> lstm_backward_cuda(const LstmOutputGradients& upstream, const Lstm& lstm,
                                       const LstmSaved& saved, const c10::List<bool>& needs) {
  check_lstm_backward(upstream, lstm, saved, needs);
  const c10::OptionalDeviceGuard guard(lstm.x.device());
  // A backward pass under autocast would cast the inputs of torch's GEMMs to the autocast type.
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  const LstmOnCuda problem(lstm);
  const int64_t num_steps = problem.num_steps();
  const auto type = problem.type(), acc_type = problem.acc_type();
  const auto saved_steps = [&](const Tensor& values) {
    return values.contiguous().view({num_steps, values.size(0), values.size(2)});
  };
  const auto before = [&](const Tensor& first, const Tensor& states) {
    return problem.without_padding(at::cat({first.unsqueeze(0), states}).slice(0, 0, num_steps));
  };
  const Tensor gates = problem.without_padding(saved_steps(saved.gates));
  const Tensor cells = saved_steps(saved.cells);
  const Tensor previous_m = before(problem.first_m(), problem.by_step(saved.m));
  const Tensor previous_c = before(problem.first_c(), cells);

  // The gradients of m_t and c_t; at first, without those that step t + 1 sends back.
  const Tensor grad_m = problem.for_steps(previous_m.size(2), acc_type).zero_();
  const Tensor grad_c = problem.for_steps(cells.size(2), acc_type).zero_();
  if (upstream.m) grad_m.copy_(problem.by_step(*upstream.m));
  if (upstream.m_n) problem.add_to_last(grad_m, *upstream.m_n);
  if (upstream.c_n) problem.add_to_last(grad_c, *upstream.c_n);
  const Tensor grad_gates = problem.for_steps(gates.size(2), acc_type);
  Tensor sent_c = at::zeros_like(problem.first_c());
  for (int64_t s = num_steps - 1; s >= 0; --s) {
    if (s + 1 < num_steps) add_mm(grad_m[s], grad_gates[s + 1].to(type), lstm.weight_recurrent);
    problem.clear_padding(grad_m[s], s);
    Tensor grad_r = grad_m[s];
    if (lstm.projection) {
      grad_r = accumulated_mm(grad_r.to(type), *lstm.projection);
      problem.clear_padding(grad_r, s);
    }
    grad_c[s].add_(sent_c);
    problem.differentiate_cells(grad_r, grad_c[s], gates[s], previous_c[s], grad_gates[s], sent_c);
  }

  const auto gradients = lstm_gradients(Cuda::empty, lstm, needs);
  const auto rows = [&](const Tensor& steps) { return steps.flatten(0, 1).to(type); };
  const Tensor grad_rows = rows(grad_gates);
  if (needs[kX]) {
    const Tensor grad_x = precise_mm(grad_rows, lstm.weight_input);
    gradients[kX].copy_(problem.by_token(grad_x.view({num_steps, lstm.x.size(0), lstm.x.size(2)})));
  }
  if (needs[kWeightInput]) {
    gradients[kWeightInput].copy_(precise_mm(grad_rows.t(), rows(problem.by_step(lstm.x))));
  }
  if (needs[kWeightRecurrent]) {
    gradients[kWeightRecurrent].copy_(precise_mm(grad_rows.t(), rows(previous_m)));
  }
  if (needs[kBias]) gradients[kBias].copy_(grad_gates.flatten(0, 1).sum(0));
  if (needs[kProjection]) {
    const Tensor r = at::empty_like(cells), c = at::empty_like(cells);
    problem.compute_cells(gates.flatten(0, 1), previous_c.flatten(0, 1), c, r);
    gradients[kProjection].copy_(precise_mm(rows(grad_m).t(), rows(r)));
  }
  if (needs[kM0]) {
    gradients[kM0].zero_();
    if (num_steps > 0) {
      gradients[kM0].copy_(precise_mm(grad_gates[0].to(type), lstm.weight_recurrent));
    }
    if (upstream.m_n) gradients[kM0].add_(problem.gradient_of_first(*upstream.m_n));
  }
  if (needs[kC0]) {
    gradients[kC0].copy_(sent_c);
    if (upstream.c_n) gradients[kC0].add_(problem.gradient_of_first(*upstream.c_n));
  }
  return gradients;
}

}  // namespace
}  // namespace moe_ext

TORCH_LIBRARY_IMPL(moe_ext, CUDA, m) {
  moe_ext::implement<"lstm", &moe_ext::lstm_of<moe_ext::lstm_cuda>>(m);
  moe_ext::implement<"_lstm_backward", &moe_ext::lstm_backward_of<moe_ext::lstm_backward_cuda>>(m);
}
