// The backward pass of the LSTM on the CPU; lstm.cpp describes it.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ceil_div.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "../implement.h"
#include "../lstm.h"
#include "../math/lstm.h"
#include "arena.h"
#include "block_scheduler.h"
#include "elementwise.h"
#include "empty_rows.h"
#include "gemm/gemm.h"
#include "lstm_layer.h"
#include "vectorize.h"

namespace moe_ext::cpu {
namespace {

// Computes the gradients of the gates of a block before their activations, and r again. grad_c
// becomes the gradient of c_{t-1}.
struct CellsBackward {
  template <typename acc_t, typename scalar_t>
  MOE_EXT_KERNEL void run(int64_t num_rows, int64_t num_block_units, int64_t num_units,
                          const acc_t* gates, const acc_t* previous_c, const acc_t* c,
                          const acc_t* grad_r, int64_t ld_grad_r, acc_t* grad_c, acc_t* grad_gates,
                          scalar_t* r) {
    const int64_t n = num_block_units;
    for (int64_t row = 0; row < num_rows; ++row) {
      const acc_t* from = gates + row * 4 * n;
      const acc_t* before = previous_c + row * num_units;
      const acc_t* now = c + row * num_units;
      const acc_t* dr = grad_r + row * ld_grad_r;
      acc_t* dc = grad_c + row * num_units;
      acc_t* to = grad_gates + row * 4 * n;
      scalar_t* to_r = r + row * num_units;
      MOE_EXT_NO_ALIAS for (int64_t u = 0; u < n; ++u) {
        const math::LstmGates<acc_t> each{from[u], from[n + u], from[2 * n + u], from[3 * n + u]};
        acc_t output;
        const auto gradient = math::lstm_gradient(each, before[u], now[u], dr[u], dc[u], output);
        to[u] = gradient.i;
        to[n + u] = gradient.f;
        to[2 * n + u] = gradient.j;
        to[3 * n + u] = gradient.o;
        to_r[u] = static_cast<scalar_t>(output);
      }
    }
  }
};

template <typename scalar_t>
class LstmBackward {
 public:
  using acc_t = at::opmath_type<scalar_t>;

  LstmBackward(const LstmOutputGradients& upstream, const Lstm& lstm, const LstmSaved& saved,
               const c10::List<bool>& needs, const std::vector<Tensor>& gradients)
      : layer_("_lstm_backward", lstm),
        lstm_(lstm),
        needs_(needs),
        gradients_(gradients),
        saved_m_(saved.m),
        gates_(saved.gates.contiguous()),
        cells_(saved.cells.contiguous()),
        weight_recurrent_(layer_.in_blocks(lstm.weight_recurrent)),
        projection_(lstm.projection
                        ? layer_.columns_in_blocks(*lstm.projection, 1, lstm.x.options())
                        : Tensor()),
        grad_gates_(empty_rows(gates_.sizes(), layer_.acc_options())),
        grad_m_(empty_rows({num_rows(), layer_.width}, layer_.acc_options())),
        grad_m_0_(at::zeros({layer_.num_sentences, layer_.width}, layer_.acc_options())),
        grad_c_(empty_rows({layer_.num_sentences, layer_.num_units}, layer_.acc_options())) {
    if (needs[kProjection]) r_ = empty_rows({num_rows(), layer_.num_units}, lstm.x.options());
    take_upstream(upstream);
  }

  void run() {
    run_steps();
    multiply();
    const auto of_sentence = [&](int64_t i) { return layer_.steps.sentences[i]; };
    const auto write = [&](LstmArgument argument, const Tensor& from) {
      if (!needs_[argument]) return;
      scatter(layer_.num_sentences, from.size(1), from.template const_data_ptr<acc_t>(),
              of_sentence, gradients_[argument].template mutable_data_ptr<scalar_t>());
    };
    write(kM0, grad_m_0_);
    write(kC0, grad_c_);
  }

 private:
  int64_t num_rows() const { return layer_.steps.num_rows(); }

  // Copies the gradients of the outputs to their rows and sentences.
  void take_upstream(const LstmOutputGradients& upstream) {
    const auto& steps = layer_.steps;
    const int64_t width = layer_.width;
    const auto data = [](const Tensor& tensor) {
      return tensor.defined() ? tensor.template const_data_ptr<scalar_t>() : nullptr;
    };
    const Tensor m = contiguous(upstream.m), m_n = contiguous(upstream.m_n),
                 c_n = contiguous(upstream.c_n);
    gather(num_rows(), width, data(m), layer_.of_token(), grad_m());
    gather(
        layer_.num_sentences, layer_.num_units, data(c_n),
        [&](int64_t i) { return steps.sentences[i]; }, grad_c());
    for (int64_t i = 0; m_n.defined() && i < layer_.num_sentences; ++i) {
      vectorized<Add>(data(m_n) + steps.sentences[i] * width, width,
                      grad_of_m_before(steps.length(i), i));
    }
  }

  // Computes the gradients of the gates and of all outputs.
  void run_steps() {
    const int64_t width = layer_.width, num_units = layer_.num_units;
    struct Workspace {
      GemmWorkspace<scalar_t> gemm;
      acc_t* dr;
      scalar_t* r;
    };
    const auto take = [&](Arena& arena, int64_t most) {
      const int64_t units_at_once = layer_.max_units();
      return Workspace{.gemm = GemmWorkspace<scalar_t>(
                           arena, {{most, units_at_once, width}, {most, width, 4 * units_at_once}}),
                       .dr = arena.take<acc_t>(most * units_at_once),
                       .r = arena.take<scalar_t>(most * num_units)};
    };
    layer_.for_sentences(take, [&](const Sentences& sentences, const Workspace& workspace) {
      for (int64_t step = layer_.steps.count() - 1; step >= 0; --step) {
        const int64_t count = layer_.steps.count_at(step, sentences);
        if (count == 0) continue;
        const int64_t row = layer_.steps.row(step, sentences.begin);
        const acc_t* const dm = grad_m() + row * width;
        acc_t* const dm_before = grad_of_m_before(step, sentences.begin);
        const acc_t* const previous_c = layer_.previous_c(cells(), step, sentences.begin);
        scalar_t* const r = r_.defined() ? this->r() + row * num_units : workspace.r;
        for (const Units& units : layer_.blocks) {
          const acc_t* dr = dm + units.first;
          int64_t ld_dr = width;
          if (projection_.defined()) {
            gemm<scalar_t>(
                count, units.count, width, plain(dm, width),
                plain(projection_.template const_data_ptr<scalar_t>() + width * units.first,
                      units.count),
                Write::kReplace, workspace.dr, workspace.gemm);
            dr = workspace.dr;
            ld_dr = units.count;
          }
          const int64_t place = layer_.gate_place(units, row), columns = 4 * units.count;
          vectorized<CellsBackward>(count, units.count, num_units, gates() + place,
                                    previous_c + units.first,
                                    cells() + row * num_units + units.first, dr, ld_dr,
                                    grad_c() + sentences.begin * num_units + units.first,
                                    grad_gates() + place, r + units.first);
          if (step == 0 && !needs_[kM0]) continue;
          gemm<scalar_t>(
              count, width, columns, plain<acc_t>(grad_gates() + place, columns),
              plain(weight_recurrent_.template const_data_ptr<scalar_t>() + 4 * units.first * width,
                    width),
              Write::kAdd, dm_before, workspace.gemm);
        }
      }
    });
  }

  // The products over all rows. A task computes some rows of a gradient in its workspace.
  using Workspace = ProductWorkspace<scalar_t>;
  using Task = std::function<void(const Workspace&)>;

  void multiply() {
    const int64_t d_input = layer_.d_input, width = layer_.width, num_units = layer_.num_units;
    const int64_t columns = 4 * layer_.max_units(), rows = std::min(num_rows(), kRowsOfTask);
    std::vector<Task> tasks;
    Tensor x, m, weight_input;
    if (needs_[kWeightInput]) {
      x = layer_.rows_of(lstm_.x, d_input);
      add_weight(tasks, x, gradients_[kWeightInput]);
    }
    if (needs_[kWeightRecurrent]) {
      m = previous_m();
      add_weight(tasks, m, gradients_[kWeightRecurrent]);
    }
    if (needs_[kProjection]) add_projection(tasks);
    if (needs_[kX]) {
      weight_input = layer_.in_blocks(lstm_.weight_input);
      add_x(tasks, weight_input);
    }
    if (needs_[kBias]) add_bias(tasks);
    for_each_task(
        static_cast<int64_t>(tasks.size()), /*progress=*/nullptr,
        num_threads_for(2 * num_rows() * num_units * (8 * d_input + 4 * width)),
        [&](Arena& arena) {
          const int64_t widest = std::max(d_input, width);
          const int64_t size = std::max({sums_size<scalar_t, acc_t>(columns, widest),
                                         sums_size<scalar_t, acc_t>(kMaxUnits, num_units),
                                         rows * d_input, 2 * columns});
          return Workspace{
              .gemm = GemmWorkspace<scalar_t>(arena, {{columns, widest, num_rows()},
                                                      {kMaxUnits, num_units, num_rows()},
                                                      {rows, d_input, columns}}),
              .sums = arena.take<acc_t>(size)};
        },
        [&](int64_t task, const Workspace& workspace) { tasks[task](workspace); });
  }

  // Returns the outputs before each row, [rows, P].
  Tensor previous_m() const {
    const auto& steps = layer_.steps;
    const int64_t width = layer_.width;
    const Tensor m = layer_.rows_of(saved_m_, width);
    Tensor before = empty_rows(m.sizes(), m.options());
    auto* to = before.template mutable_data_ptr<scalar_t>();
    for (int64_t step = 0; step < steps.count(); ++step) {
      const int64_t size = steps.count_at(step, {0, layer_.num_sentences}) * width;
      const scalar_t* from = layer_.previous_m(m.template const_data_ptr<scalar_t>(), step, 0);
      if (from == nullptr) {
        std::fill_n(to, size, scalar_t(0));
      } else {
        std::copy_n(from, size, to);
      }
      to += size;
    }
    return before;
  }

  // dW = dZ^T rows
  void add_weight(std::vector<Task>& tasks, const Tensor& rows, const Tensor& gradient) const {
    const int64_t columns = rows.size(1);
    for (const Units& units : layer_.blocks) {
      for (int64_t gate = 0; gate < 4; ++gate) {
        const acc_t* const dz = grad_gates() + layer_.gate_place(units, 0) + gate * units.count;
        scalar_t* const to = gradient.template mutable_data_ptr<scalar_t>() +
                             (gate * layer_.num_units + units.first) * columns;
        const auto* from = rows.template const_data_ptr<scalar_t>();
        tasks.push_back([=, this](const Workspace& workspace) {
          product(units.count, columns, num_rows(), transposed(dz, 4 * units.count),
                  plain(from, columns), to, workspace);
        });
      }
    }
  }

  // dP = dM^T R
  void add_projection(std::vector<Task>& tasks) const {
    const int64_t width = layer_.width, num_units = layer_.num_units;
    auto* const to = gradients_[kProjection].template mutable_data_ptr<scalar_t>();
    for (int64_t first = 0; first < width; first += kMaxUnits) {
      tasks.push_back([=, this](const Workspace& workspace) {
        product(std::min(kMaxUnits, width - first), num_units, num_rows(),
                transposed<acc_t>(grad_m() + first, width), plain<scalar_t>(r(), num_units),
                to + first * num_units, workspace);
      });
    }
  }

  // dX = dZ W, written to the tokens
  void add_x(std::vector<Task>& tasks, const Tensor& weight) const {
    const int64_t d_input = layer_.d_input;
    const Tensor& gradient = gradients_[kX];
    if (num_rows() < layer_.num_sentences * layer_.num_tokens || layer_.num_units == 0) {
      gradient.zero_();
    }
    auto* const to = gradient.template mutable_data_ptr<scalar_t>();
    const auto* const w = weight.template const_data_ptr<scalar_t>();
    const int64_t num_parts = at::ceil_div(num_rows(), kRowsOfTask);
    for (int64_t part = 0; part < num_parts; ++part) {
      const int64_t begin = part * num_rows() / num_parts;
      const int64_t count = (part + 1) * num_rows() / num_parts - begin;
      tasks.push_back([=, this](const Workspace& workspace) {
        for (const Units& units : layer_.blocks) {
          const int64_t columns = 4 * units.count;
          gemm<scalar_t>(count, d_input, columns,
                         plain<acc_t>(grad_gates() + layer_.gate_place(units, begin), columns),
                         plain(w + 4 * units.first * d_input, d_input),
                         units.first == 0 ? Write::kReplace : Write::kAdd, workspace.sums,
                         workspace.gemm);
        }
        for (int64_t r = 0; r < count && layer_.num_units > 0; ++r) {
          vectorized<Convert>(static_cast<const acc_t*>(workspace.sums + r * d_input), d_input,
                              to + layer_.steps.tokens[begin + r] * d_input);
        }
      });
    }
  }

  void add_bias(std::vector<Task>& tasks) const {
    auto* const to = gradients_[kBias].template mutable_data_ptr<scalar_t>();
    for (const Units& units : layer_.blocks) {
      tasks.push_back([=, this](const Workspace& workspace) {
        const int64_t columns = 4 * units.count;
        acc_t *const sum = workspace.sums, *const group = sum + columns;
        vectorized<SumOfRows>(static_cast<const acc_t*>(grad_gates() + layer_.gate_place(units, 0)),
                              num_rows(), columns, group, sum);
        for (int64_t gate = 0; gate < 4; ++gate) {
          vectorized<Convert>(static_cast<const acc_t*>(sum + gate * units.count), units.count,
                              to + gate * layer_.num_units + units.first);
        }
      });
    }
  }

  // The gradient of the output before a step.
  acc_t* grad_of_m_before(int64_t step, int64_t sentence) const {
    if (step > 0) return grad_m() + layer_.steps.row(step - 1, sentence) * layer_.width;
    return grad_m_0_.template mutable_data_ptr<acc_t>() + sentence * layer_.width;
  }

  const acc_t* gates() const { return gates_.template const_data_ptr<acc_t>(); }
  const acc_t* cells() const { return cells_.template const_data_ptr<acc_t>(); }
  acc_t* grad_gates() const { return grad_gates_.template mutable_data_ptr<acc_t>(); }
  acc_t* grad_m() const { return grad_m_.template mutable_data_ptr<acc_t>(); }
  acc_t* grad_c() const { return grad_c_.template mutable_data_ptr<acc_t>(); }
  scalar_t* r() const { return r_.template mutable_data_ptr<scalar_t>(); }

  const Layer<scalar_t> layer_;
  const Lstm& lstm_;
  const c10::List<bool> needs_;
  const std::vector<Tensor>& gradients_;
  const Tensor saved_m_, gates_, cells_;
  const Tensor weight_recurrent_;  // [4 U, P] in the order of the blocks
  const Tensor projection_;        // [P, U] by blocks of columns, or undefined
  const Tensor grad_gates_;        // before the activations, in the order of gates_
  const Tensor grad_m_;            // [rows, P]
  const Tensor grad_m_0_;          // [B, P] in the order of the steps
  const Tensor grad_c_;            // [B, U] in the order of the steps, of the step in progress
  Tensor r_;                       // [rows, U], the outputs before the projection, if needed
};

std::vector<Tensor> lstm_backward_cpu(const LstmOutputGradients& upstream, const Lstm& lstm,
                                      const LstmSaved& saved, const c10::List<bool>& needs) {
  check_lstm_backward(upstream, lstm, saved, needs);
  std::vector<Tensor> gradients = lstm_gradients(empty, lstm, needs);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, lstm.x.scalar_type(), "_lstm_backward",
      [&] { LstmBackward<scalar_t>(upstream, lstm, saved, needs, gradients).run(); });
  return gradients;
}

}  // namespace
}  // namespace moe_ext::cpu

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  moe_ext::implement<"_lstm_backward", &moe_ext::lstm_backward_of<moe_ext::cpu::lstm_backward_cpu>>(
      m);
}
