// The backward pass of the LSTM on the CPU; lstm.cpp describes it.
#include <algorithm>
#include <functional>
#include <vector>

#include "../kernels/lstm.h"
#include "../math/integers.h"
#include "../math/lstm.h"
#include "arena.h"
#include "block_scheduler.h"
#include "elementwise.h"
#include "gemm/gemm.h"
#include "lstm_layer.h"
#include "memory.h"
#include "vectorize.h"

namespace moe_ext {
namespace cpu {
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
class BackwardPass {
 public:
  using acc_t = acc_type<scalar_t>;

  explicit BackwardPass(const LstmBackward<scalar_t>& lstm)
      : lstm_(lstm),
        layer_(lstm.layer),
        weight_recurrent_(layer_.in_blocks(lstm.layer.weight_recurrent, layer_.width)),
        grad_gates_(layer_.num_sentences * layer_.num_tokens * 4 * layer_.num_units),
        grad_m_(num_rows() * layer_.width),
        grad_m_0_(layer_.num_sentences * layer_.width),
        grad_c_(layer_.num_sentences * layer_.num_units) {
    if (has_projection()) projection_ = layer_.columns_in_blocks(lstm.layer.projection);
    if (lstm.grad_projection != nullptr) r_ = Array<scalar_t>(num_rows() * layer_.num_units);
    std::fill_n(grad_m_0_.data(), layer_.num_sentences * layer_.width, acc_t(0));
    take_upstream();
  }

  void run() {
    run_steps();
    multiply();
    const auto of_sentence = [&](int64_t i) { return layer_.steps.sentences[i]; };
    const auto write = [&](const Array<acc_t>& from, int64_t width, scalar_t* to) {
      if (to == nullptr) return;
      scatter(layer_.num_sentences, width, static_cast<const acc_t*>(from.data()), of_sentence, to);
    };
    write(grad_m_0_, layer_.width, lstm_.grad_m_0);
    write(grad_c_, layer_.num_units, lstm_.grad_c_0);
  }

 private:
  int64_t num_rows() const { return layer_.steps.num_rows(); }

  // Copies the gradients of the outputs to their rows and sentences.
  void take_upstream() {
    const auto& steps = layer_.steps;
    const int64_t width = layer_.width;
    gather(num_rows(), width, lstm_.grad_m, layer_.of_token(), grad_m());
    gather(
        layer_.num_sentences, layer_.num_units, lstm_.grad_c_n,
        [&](int64_t i) { return steps.sentences[i]; }, grad_c());
    for (int64_t i = 0; lstm_.grad_m_n != nullptr && i < layer_.num_sentences; ++i) {
      vectorized<Add>(lstm_.grad_m_n + steps.sentences[i] * width, width,
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
        scalar_t* const r = r_.data() != nullptr ? r_.data() + row * num_units : workspace.r;
        for (const Units& units : layer_.blocks) {
          const acc_t* dr = dm + units.first;
          int64_t ld_dr = width;
          if (has_projection()) {
            gemm<scalar_t>(count, units.count, width, plain(dm, width),
                           plain<scalar_t>(projection_.data() + width * units.first, units.count),
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
          if (step == 0 && lstm_.grad_m_0 == nullptr) continue;
          gemm<scalar_t>(count, width, columns, plain<acc_t>(grad_gates() + place, columns),
                         plain<scalar_t>(weight_recurrent_.data() + 4 * units.first * width, width),
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
    const int64_t columns = 4 * layer_.max_units(), rows = std::min(num_rows(), kFullRateRows);
    std::vector<Task> tasks;
    Array<scalar_t> x, m, weight_input;
    if (lstm_.grad_weight_input != nullptr) {
      x = layer_.rows_of(lstm_.layer.x, d_input);
      add_weight(tasks, x.data(), d_input, lstm_.grad_weight_input);
    }
    if (lstm_.grad_weight_recurrent != nullptr) {
      m = previous_m();
      add_weight(tasks, m.data(), width, lstm_.grad_weight_recurrent);
    }
    if (lstm_.grad_projection != nullptr) add_projection(tasks);
    if (lstm_.grad_x != nullptr) {
      weight_input = layer_.in_blocks(lstm_.layer.weight_input, d_input);
      add_x(tasks, weight_input.data());
    }
    if (lstm_.grad_bias != nullptr) add_bias(tasks);
    for_each_task(
        static_cast<int64_t>(tasks.size()), /*progress=*/nullptr,
        num_threads_for(2 * num_rows() * num_units * (8 * d_input + 4 * width)),
        [&](Arena& arena) {
          const int64_t widest = std::max(d_input, width);
          const int64_t size = std::max({rounded_sums_size<scalar_t>(columns, widest),
                                         rounded_sums_size<scalar_t>(kMaxUnits, num_units),
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
  Array<scalar_t> previous_m() const {
    const auto& steps = layer_.steps;
    const int64_t width = layer_.width;
    const Array<scalar_t> m = layer_.rows_of(lstm_.m, width);
    Array<scalar_t> before(num_rows() * width);
    scalar_t* to = before.data();
    for (int64_t step = 0; step < steps.count(); ++step) {
      const int64_t size = steps.count_at(step, {0, layer_.num_sentences}) * width;
      const scalar_t* from = layer_.previous_m(m.data(), step, 0);
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
  void add_weight(std::vector<Task>& tasks, const scalar_t* rows, int64_t columns,
                  scalar_t* gradient) const {
    for (const Units& units : layer_.blocks) {
      for (int64_t gate = 0; gate < 4; ++gate) {
        const acc_t* const dz = grad_gates() + layer_.gate_place(units, 0) + gate * units.count;
        scalar_t* const to = gradient + (gate * layer_.num_units + units.first) * columns;
        tasks.push_back([=, this](const Workspace& workspace) {
          product(units.count, columns, num_rows(), transposed(dz, 4 * units.count),
                  plain(rows, columns), to, workspace);
        });
      }
    }
  }

  // dP = dM^T R
  void add_projection(std::vector<Task>& tasks) const {
    const int64_t width = layer_.width, num_units = layer_.num_units;
    scalar_t* const to = lstm_.grad_projection;
    for (int64_t first = 0; first < width; first += kMaxUnits) {
      tasks.push_back([=, this](const Workspace& workspace) {
        product(std::min(kMaxUnits, width - first), num_units, num_rows(),
                transposed<acc_t>(grad_m() + first, width), plain<scalar_t>(r_.data(), num_units),
                to + first * num_units, workspace);
      });
    }
  }

  // dX = dZ W, written to the tokens
  void add_x(std::vector<Task>& tasks, const scalar_t* w) const {
    const int64_t d_input = layer_.d_input, all = layer_.num_sentences * layer_.num_tokens;
    scalar_t* const to = lstm_.grad_x;
    if (num_rows() < all || layer_.num_units == 0) std::fill_n(to, all * d_input, scalar_t(0));
    const int64_t num_parts = ceil_div(num_rows(), kFullRateRows);
    for (int64_t part = 0; part < num_parts; ++part) {
      const Part rows = part_of(num_rows(), part, num_parts);
      tasks.push_back([=, this](const Workspace& workspace) {
        for (const Units& units : layer_.blocks) {
          const int64_t columns = 4 * units.count;
          gemm<scalar_t>(rows.size(), d_input, columns,
                         plain<acc_t>(grad_gates() + layer_.gate_place(units, rows.begin), columns),
                         plain(w + 4 * units.first * d_input, d_input),
                         units.first == 0 ? Write::kReplace : Write::kAdd, workspace.sums,
                         workspace.gemm);
        }
        for (int64_t r = 0; r < rows.size() && layer_.num_units > 0; ++r) {
          vectorized<Convert>(static_cast<const acc_t*>(workspace.sums + r * d_input), d_input,
                              to + layer_.steps.tokens[rows.begin + r] * d_input);
        }
      });
    }
  }

  void add_bias(std::vector<Task>& tasks) const {
    scalar_t* const to = lstm_.grad_bias;
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
    return grad_m_0_.data() + sentence * layer_.width;
  }

  bool has_projection() const { return lstm_.layer.projection != nullptr; }
  const acc_t* gates() const { return lstm_.gates; }
  const acc_t* cells() const { return lstm_.cells; }
  acc_t* grad_gates() const { return grad_gates_.data(); }
  acc_t* grad_m() const { return grad_m_.data(); }
  acc_t* grad_c() const { return grad_c_.data(); }

  const LstmBackward<scalar_t>& lstm_;
  const Layer<scalar_t> layer_;
  const Array<scalar_t> weight_recurrent_;  // [4 U, P] in the order of the blocks
  Array<scalar_t> projection_;              // [P, U] by blocks of columns, or no memory
  const Array<acc_t> grad_gates_;           // before the activations, in the order of the gates
  const Array<acc_t> grad_m_;               // [rows, P]
  const Array<acc_t> grad_m_0_;             // [B, P] in the order of the steps
  const Array<acc_t> grad_c_;  // [B, U] in the order of the steps, of the step in progress
  Array<scalar_t> r_;          // [rows, U], the outputs before the projection, if needed
};

}  // namespace
}  // namespace cpu
using namespace cpu;

template <typename scalar_t>
void LstmBackward<scalar_t>::on_cpu() const {
  BackwardPass<scalar_t>(*this).run();
}
MOE_EXT_DEFINE_RUN_ON_CPU(LstmBackward)

}  // namespace moe_ext
