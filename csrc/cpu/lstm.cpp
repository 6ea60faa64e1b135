// An LSTM with or without a projection on the CPU.
//
// All matrices have one row for each token, step by step: padding has no row. The sentences
// are sorted by length, longest first, so the sentences that have a token at a step are the first
// ones. The columns of the gates are in blocks: a block has i, f, j and o of at most kMaxUnits
// units. The cells of a block follow its GEMM while its gates are in the cache.
//
// Forward: one product multiplies the tokens of all steps by weight_input. Then each thread takes
// some sentences through all steps; it waits for no other thread.
//
// Backward: the steps compute only the gradients of the gates, and of the state that the step
// before returned. Then each gradient of a weight is one product over all rows.
//
// A sentence's results do not depend on the other sentences or on the threads.
#include "../kernels/lstm.h"

#include <algorithm>

#include "../math/integers.h"
#include "../math/lstm.h"
#include "arena.h"
#include "block_scheduler.h"
#include "elementwise.h"
#include "gemm/gemm.h"
#include "gemm/micro_kernels.h"
#include "lstm_layer.h"
#include "memory.h"
#include "vectorize.h"

namespace moe_ext {
namespace cpu {
namespace {

// Computes the cells of a block of units in some rows. `gates` has W [x_t, m_{t-1}] and becomes the
// gates.
struct Cells {
  template <typename acc_t, typename scalar_t>
  MOE_EXT_KERNEL void run(int64_t num_rows, int64_t num_block_units, int64_t num_units,
                          const acc_t* bias, const acc_t* previous_c, acc_t* gates, acc_t* c,
                          scalar_t* r) {
    const int64_t n = num_block_units;
    for (int64_t row = 0; row < num_rows; ++row) {
      acc_t* z = gates + row * 4 * n;
      const acc_t* before = previous_c + row * num_units;
      acc_t* to_c = c + row * num_units;
      scalar_t* to_r = r + row * num_units;
      MOE_EXT_NO_ALIAS for (int64_t u = 0; u < n; ++u) {
        const auto each =
            math::lstm_gates(z[u] + bias[u], z[n + u] + bias[n + u], z[2 * n + u] + bias[2 * n + u],
                             z[3 * n + u] + bias[3 * n + u]);
        const auto cell = math::lstm_cell(each, before[u]);
        z[u] = each.i;
        z[n + u] = each.f;
        z[2 * n + u] = each.j;
        z[3 * n + u] = each.o;
        to_c[u] = cell.c;
        to_r[u] = static_cast<scalar_t>(cell.r);
      }
    }
  }
};

template <typename scalar_t>
class ForwardPass {
 public:
  using acc_t = acc_type<scalar_t>;

  explicit ForwardPass(const LstmForward<scalar_t>& lstm)
      : lstm_(lstm),
        layer_(lstm.layer),
        x_(layer_.rows_of(lstm.layer.x, layer_.d_input)),
        weight_input_(layer_.in_blocks(lstm.layer.weight_input, layer_.d_input)),
        bias_(layer_.template in_blocks<acc_t>(lstm.layer.bias, 1)),
        m_(layer_.steps.num_rows() * layer_.width) {
    const scalar_t* recurrent = lstm.layer.weight_recurrent;
    if (micro_kernels<scalar_t, acc_t>().pairs) {
      recurrent_pairs_ = layer_.template transposed_in_blocks<scalar_t>(recurrent);
    } else {
      recurrent_ = layer_.template transposed_in_blocks<acc_t>(recurrent);
    }
    if (lstm.layer.projection == nullptr) return;
    projection_ = Array<acc_t>(layer_.num_units * layer_.width);
    transpose_rows(
        layer_.width, layer_.num_units, lstm.layer.projection, [](int64_t row) { return row; },
        projection_.data());
  }

  void run() {
    multiply_inputs();
    run_steps();
    write_outputs();
  }

 private:
  void multiply_inputs() {
    const int64_t num_rows = layer_.steps.num_rows(), d_input = layer_.d_input;
    const int64_t num_parts = ceil_div(num_rows, kFullRateRows);
    const int64_t most = std::min(num_rows, kFullRateRows);
    for_each_task(
        num_parts * static_cast<int64_t>(layer_.blocks.size()), /*progress=*/nullptr,
        num_threads_for(2 * num_rows * 4 * layer_.num_units * d_input),
        [&](Arena& arena) {
          return GemmWorkspace<scalar_t>(arena, {{most, 4 * layer_.max_units(), d_input}});
        },
        [&](int64_t task, const GemmWorkspace<scalar_t>& workspace) {
          const Units units = layer_.blocks[task / num_parts];
          const Part rows = part_of(num_rows, task % num_parts, num_parts);
          gemm<scalar_t>(
              rows.size(), 4 * units.count, d_input,
              plain<scalar_t>(x_.data() + rows.begin * d_input, d_input),
              transposed<scalar_t>(weight_input_.data() + 4 * units.first * d_input, d_input),
              Write::kReplace, gates() + layer_.gate_place(units, rows.begin), workspace);
        });
  }

  void run_steps() {
    const int64_t width = layer_.width, num_units = layer_.num_units;
    struct Workspace {
      ProductWorkspace<scalar_t> product;
      scalar_t* r;
    };
    const auto take = [&](Arena& arena, int64_t most) {
      return Workspace{
          {.gemm = GemmWorkspace<scalar_t>(
               arena, {{most, 4 * layer_.max_units(), width}, {most, width, num_units}}),
           .sums = arena.take<acc_t>(rounded_sums_size<scalar_t>(most, width))},
          arena.take<scalar_t>(most * num_units)};
    };
    layer_.for_sentences(take, [&](const Sentences& sentences, const Workspace& workspace) {
      for (int64_t step = 0; step < layer_.steps.count(); ++step) {
        const int64_t count = layer_.steps.count_at(step, sentences);
        if (count == 0) break;
        const int64_t row = layer_.steps.row(step, sentences.begin);
        const scalar_t* before = layer_.previous_m(m(), step, sentences.begin);
        const acc_t* previous_c = layer_.previous_c(cells(), step, sentences.begin);
        scalar_t* const m_row = m() + row * width;
        scalar_t* const r = has_projection() ? workspace.r : m_row;
        for (const Units& units : layer_.blocks) {
          acc_t* const z = gates() + layer_.gate_place(units, row);
          if (before != nullptr) {
            const auto add_product = [&](const auto* weight) {
              const int64_t columns = 4 * units.count;
              gemm<scalar_t>(count, columns, width, plain(before, width),
                             plain(weight + 4 * units.first * width, columns), Write::kAdd, z,
                             workspace.product.gemm);
            };
            if (recurrent_pairs_.data() != nullptr) {
              add_product(static_cast<const scalar_t*>(recurrent_pairs_.data()));
            } else {
              add_product(static_cast<const acc_t*>(recurrent_.data()));
            }
          }
          vectorized<Cells>(count, units.count, num_units,
                            static_cast<const acc_t*>(bias_.data()) + 4 * units.first,
                            previous_c + units.first, z, cells() + row * num_units + units.first,
                            r + units.first);
        }
        if (has_projection()) {
          product(count, width, num_units, plain<scalar_t>(r, num_units),
                  plain<acc_t>(projection_.data(), width), m_row, workspace.product);
        }
      }
    });
  }

  // Copies the outputs from their rows. What has no token is zero.
  void write_outputs() {
    const auto& steps = layer_.steps;
    const int64_t width = layer_.width, num_units = layer_.num_units;
    const int64_t num_rows = steps.num_rows(), all = layer_.num_sentences * layer_.num_tokens;
    if (num_rows < all) {
      std::fill_n(lstm_.m, all * width, scalar_t(0));
      for (const Units& units : layer_.blocks) {
        acc_t* const end = gates() + layer_.gate_place(units, all);
        std::fill(gates() + layer_.gate_place(units, num_rows), end, acc_t(0));
      }
      std::fill(cells() + num_rows * num_units, cells() + all * num_units, acc_t(0));
    }
    scatter(num_rows, width, static_cast<const scalar_t*>(m()), layer_.of_token(), lstm_.m);
    scalar_t *const last_m = lstm_.m_n, *const last_c = lstm_.c_n;
    for (int64_t i = 0; i < layer_.num_sentences; ++i) {
      const int64_t to = steps.sentences[i];
      const scalar_t* from = layer_.previous_m(m(), steps.length(i), i);
      if (from == nullptr) {
        std::fill_n(last_m + to * width, width, scalar_t(0));
      } else {
        std::copy_n(from, width, last_m + to * width);
      }
      vectorized<Convert>(layer_.previous_c(cells(), steps.length(i), i), num_units,
                          last_c + to * num_units);
    }
  }

  bool has_projection() const { return projection_.data() != nullptr; }
  acc_t* gates() const { return lstm_.gates; }
  acc_t* cells() const { return lstm_.cells; }
  scalar_t* m() const { return m_.data(); }

  const LstmForward<scalar_t>& lstm_;
  const Layer<scalar_t> layer_;
  const Array<scalar_t> x_;             // [rows, D]
  const Array<scalar_t> weight_input_;  // [4 U, D] in the order of the blocks
  const Array<acc_t> bias_;             // [4 U] in the order of the blocks
  const Array<scalar_t> m_;             // [rows, P]
  // The recurrent weight [P, 4 U] by blocks of columns, in the type that the micro-kernels read in
  // place at each step; the other array has no memory.
  Array<acc_t> recurrent_;
  Array<scalar_t> recurrent_pairs_;
  Array<acc_t> projection_;  // [U, P], or no memory
};

}  // namespace
}  // namespace cpu
using namespace cpu;

template <typename scalar_t>
void LstmForward<scalar_t>::on_cpu() const {
  ForwardPass<scalar_t>(*this).run();
}
MOE_EXT_DEFINE_RUN_ON_CPU(LstmForward)

}  // namespace moe_ext
