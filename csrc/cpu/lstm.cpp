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
#include "../lstm.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <type_traits>
#include <vector>

#include "../implement.h"
#include "../math/lstm.h"
#include "block_scheduler.h"
#include "elementwise.h"
#include "empty_rows.h"
#include "gemm/gemm.h"
#include "parallel.h"
#include "vectorize.h"
#include "workspace.h"

namespace moe_ext::cpu {
namespace {

// The most units of a block. A GEMM of a block reads the outputs of a step once.
constexpr int64_t kMaxUnits = 128;

// The fewest sentences of a thread: each thread reads the recurrent weight at each step.
constexpr int64_t kMinSentences = 8;

// The most rows of a task in the products over all rows.
constexpr int64_t kRowsOfTask = 640;

struct Units {
  int64_t first, count;
};

// Consecutive sentences in the order of Steps.
struct Sentences {
  int64_t begin, end;
};

// The tokens of sentences as rows, in the order of the steps of the LSTM.
class Steps {
 public:
  Steps(const OptionalTensor& lengths, int64_t num_sentences, int64_t num_tokens, bool reverse)
      : sentences(num_sentences), lengths_(num_sentences, num_tokens), first_rows_{0} {
    if (lengths) std::copy_n(lengths->const_data_ptr<int64_t>(), num_sentences, lengths_.data());
    std::iota(sentences.begin(), sentences.end(), int64_t{0});
    std::stable_sort(sentences.begin(), sentences.end(),
                     [&](int64_t a, int64_t b) { return lengths_[a] > lengths_[b]; });
    int64_t count = num_sentences;
    for (int64_t step = 0; step < num_tokens; ++step) {
      while (count > 0 && length(count - 1) <= step) --count;
      if (count == 0) break;
      for (int64_t i = 0; i < count; ++i) {
        tokens.push_back(sentences[i] * num_tokens + (reverse ? length(i) - 1 - step : step));
      }
      first_rows_.push_back(static_cast<int64_t>(tokens.size()));
    }
  }

  int64_t num_rows() const { return first_rows_.back(); }
  int64_t count() const { return static_cast<int64_t>(first_rows_.size()) - 1; }

  // The number of tokens of the i-th sentence.
  int64_t length(int64_t i) const { return lengths_[sentences[i]]; }

  // The row of the i-th sentence at a step.
  int64_t row(int64_t step, int64_t i) const { return first_rows_[step] + i; }

  // The number of sentences that have a token at a step, among some sentences.
  int64_t count_at(int64_t step, const Sentences& among) const {
    const int64_t end = first_rows_[step + 1] - first_rows_[step];
    return std::max<int64_t>(std::min(end, among.end) - among.begin, 0);
  }

  // Divides the sentences into parts with about the same number of tokens.
  std::vector<Sentences> split(int64_t num_parts) const {
    const auto num_sentences = static_cast<int64_t>(sentences.size());
    std::vector<Sentences> parts;
    int64_t i = 0, num_tokens = 0;
    for (int64_t part = 1; part <= num_parts; ++part) {
      const int64_t begin = i;
      while (i < num_sentences && num_tokens < num_rows() * part / num_parts) {
        num_tokens += length(i++);
      }
      parts.push_back({begin, i});
    }
    return parts;
  }

  std::vector<int64_t> sentences;  // the place of the i-th sentence in the batch
  std::vector<int64_t> tokens;     // the place of the token of each row in the batch, b S + s

 private:
  std::vector<int64_t> lengths_;     // in the order of the batch
  std::vector<int64_t> first_rows_;  // of each step, and the number of rows
};

// Copies row place(r) of `from` to row r of `to`, for all r. Without `from`, writes zeros.
template <typename from_t, typename to_t, typename Place>
void gather(int64_t num_rows, int64_t width, const from_t* from, const Place& place, to_t* to) {
  parallel_for(num_rows, width, [&](int64_t begin, int64_t end) {
    if (from == nullptr) return std::fill(to + begin * width, to + end * width, to_t(0));
    for (int64_t r = begin; r < end; ++r) {
      vectorized<Convert>(from + place(r) * width, width, to + r * width);
    }
  });
}

// Copies row r of `from` to row place(r) of `to`, for all r.
template <typename from_t, typename to_t, typename Place>
void scatter(int64_t num_rows, int64_t width, const from_t* from, const Place& place, to_t* to) {
  parallel_for(num_rows, width, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      vectorized<Convert>(from + r * width, width, to + place(r) * width);
    }
  });
}

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

// The sizes of an LSTM, its steps, and its weights in the order of the blocks.
template <typename scalar_t>
class Layer {
 public:
  using acc_t = at::opmath_type<scalar_t>;

  Layer(const char* op, const Lstm& lstm)
      : num_sentences(lstm.x.size(0)),
        num_tokens(lstm.x.size(1)),
        d_input(lstm.x.size(2)),
        num_units(lstm.weight_input.size(0) / 4),
        width(lstm.weight_recurrent.size(1)),
        steps(lengths_of(op, lstm), num_sentences, num_tokens, lstm.reverse),
        blocks(blocks_of(num_units)),
        options_(lstm.x.options()) {
    const auto of_sentence = [&](int64_t i) { return steps.sentences[i]; };
    if (lstm.m_0) {
      m_0 = empty_rows({num_sentences, width}, options_);
      const Tensor from = lstm.m_0->contiguous();
      gather(num_sentences, width, from.template const_data_ptr<scalar_t>(), of_sentence,
             m_0.template mutable_data_ptr<scalar_t>());
    }
    c_0 = empty_rows({num_sentences, num_units}, acc_options());
    const Tensor from = lstm.c_0 ? lstm.c_0->contiguous() : Tensor();
    gather(num_sentences, num_units,
           from.defined() ? from.template const_data_ptr<scalar_t>() : nullptr, of_sentence,
           c_0.template mutable_data_ptr<acc_t>());
  }

  at::TensorOptions acc_options() const {
    return options_.dtype(c10::CppTypeToScalarType<acc_t>::value);
  }

  // Returns the rows of a matrix [B S, columns] of the batch.
  Tensor rows_of(const Tensor& matrix, int64_t columns) const {
    Tensor rows = empty_rows({steps.num_rows(), columns}, options_);
    const Tensor from = matrix.contiguous();
    gather(steps.num_rows(), columns, from.template const_data_ptr<scalar_t>(), of_token(),
           rows.template mutable_data_ptr<scalar_t>());
    return rows;
  }

  // Maps a row to its token.
  auto of_token() const {
    return [this](int64_t row) { return steps.tokens[row]; };
  }

  // Returns the rows of a weight [4 U, columns], or the elements of a bias, in the order of the
  // blocks.
  Tensor in_blocks(const Tensor& weight) const {
    Tensor order = at::empty({4 * num_units}, options_.dtype(at::kLong));
    auto* next = order.template mutable_data_ptr<int64_t>();
    for (const auto& [first, count] : blocks) {
      for (int64_t gate = 0; gate < 4; ++gate, next += count) {
        std::iota(next, next + count, gate * num_units + first);
      }
    }
    return weight.index_select(0, order);
  }

  // Returns the columns of a matrix [rows, columns_of_unit U], one block after the other; each is
  // contiguous.
  Tensor columns_in_blocks(const Tensor& matrix, int64_t columns_of_unit,
                           const at::TensorOptions& options) const {
    const int64_t rows = matrix.size(0);
    Tensor copy = empty_rows({matrix.numel()}, options);
    for (const auto& [first, count] : blocks) {
      const int64_t columns = columns_of_unit * count, begin = columns_of_unit * first;
      copy.narrow(0, rows * begin, rows * columns)
          .view({rows, columns})
          .copy_(matrix.narrow(1, begin, columns));
    }
    return copy;
  }

  // The place of a row in the columns of a block of units, in a matrix like `gates`.
  int64_t gate_place(const Units& units, int64_t row) const {
    return 4 * (units.first * num_sentences * num_tokens + row * units.count);
  }

  // The state of the cells before the rows of some sentences at a step.
  const acc_t* previous_c(const acc_t* cells, int64_t step, int64_t sentence) const {
    if (step > 0) return cells + steps.row(step - 1, sentence) * num_units;
    return c_0.template const_data_ptr<acc_t>() + sentence * num_units;
  }

  // The output before the rows of some sentences at a step; null stands for zeros.
  const scalar_t* previous_m(const scalar_t* m, int64_t step, int64_t sentence) const {
    if (step > 0) return m + steps.row(step - 1, sentence) * width;
    return m_0.defined() ? m_0.template const_data_ptr<scalar_t>() + sentence * width : nullptr;
  }

  // Calls body(sentences, workspace) on each thread.
  template <typename Body>
  void for_sentences(int64_t workspace_size, const Body& body) const {
    const int64_t useful = std::max<int64_t>(1, num_sentences / kMinSentences);
    const int64_t num_threads =
        std::min(num_threads_for(2 * steps.num_rows() * 4 * num_units * (width + 1)), useful);
    const auto parts = steps.split(num_threads);
    for_each_task<acc_t>(num_threads, nullptr, num_threads, workspace_size, acc_options(),
                         [&](int64_t part, acc_t* workspace) { body(parts[part], workspace); });
  }

  int64_t max_units() const { return blocks.empty() ? 0 : blocks.front().count; }

  const int64_t num_sentences, num_tokens, d_input, num_units, width;
  const Steps steps;
  const std::vector<Units> blocks;
  Tensor m_0;  // in the order of the steps; undefined stands for zeros
  Tensor c_0;  // in the order of the steps

 private:
  static OptionalTensor lengths_of(const char* op, const Lstm& lstm) {
    const OptionalTensor lengths = contiguous_index(lstm.lengths);
    if (lengths) check_index_range(op, "lengths", *lengths, lstm.x.size(1) + 1);
    return lengths;
  }

  // The blocks have the same number of units, but for the last one.
  static std::vector<Units> blocks_of(int64_t num_units) {
    constexpr int64_t kMultiple = 16;  // of units: the GEMM reads whole vectors
    std::vector<Units> blocks;
    if (num_units == 0) return blocks;
    const int64_t count =
        at::round_up(at::ceil_div(num_units, at::ceil_div(num_units, kMaxUnits)), kMultiple);
    for (int64_t first = 0; first < num_units; first += count) {
      blocks.push_back({first, std::min(count, num_units - first)});
    }
    return blocks;
  }

  const at::TensorOptions options_;
};

// C = A B, rounded to scalar_t, for k of at least 0.
template <typename scalar_t, typename a_t, typename b_t, typename acc_t>
void product(int64_t m, int64_t n, int64_t k, Operand<a_t> a, Operand<b_t> b, scalar_t* c,
             acc_t* sums, acc_t* workspace) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    std::fill_n(c, m * n, scalar_t(0));
  } else if constexpr (std::is_same_v<scalar_t, acc_t>) {
    gemm<scalar_t>(m, n, k, a, b, Write::kReplace, c, workspace);
  } else {
    gemm_rounded<scalar_t>(m, n, k, a, b, Write::kReplace, c, sums, workspace);
  }
}

// The number of elements of `sums` of a product.
template <typename scalar_t, typename acc_t>
int64_t sums_size(int64_t m, int64_t n) {
  return std::is_same_v<scalar_t, acc_t> ? 0 : whole_lines(rounded_sums_size(m, n));
}

template <typename scalar_t>
class LstmForward {
 public:
  using acc_t = at::opmath_type<scalar_t>;

  LstmForward(const char* op, const Lstm& lstm, const LstmOutputs& outputs)
      : layer_(op, lstm),
        outputs_(outputs),
        x_(layer_.rows_of(lstm.x, layer_.d_input)),
        weight_input_(layer_.in_blocks(lstm.weight_input)),
        weight_recurrent_(layer_.columns_in_blocks(
            layer_.in_blocks(lstm.weight_recurrent).to(acc_type()).t(), 4, layer_.acc_options())),
        bias_(lstm.bias ? layer_.in_blocks(lstm.bias->contiguous()).to(acc_type())
                        : at::zeros({4 * layer_.num_units}, layer_.acc_options())),
        projection_(lstm.projection ? lstm.projection->to(acc_type()).t().contiguous() : Tensor()),
        m_(empty_rows({layer_.steps.num_rows(), layer_.width}, lstm.x.options())) {}

  void run() {
    multiply_inputs();
    run_steps();
    write_outputs();
  }

 private:
  static constexpr at::ScalarType acc_type() { return c10::CppTypeToScalarType<acc_t>::value; }

  void multiply_inputs() {
    const int64_t num_rows = layer_.steps.num_rows(), d_input = layer_.d_input;
    const int64_t num_parts = at::ceil_div(num_rows, kRowsOfTask);
    const int64_t most = std::min(num_rows, kRowsOfTask);
    for_each_task<acc_t>(
        num_parts * static_cast<int64_t>(layer_.blocks.size()), nullptr,
        num_threads_for(2 * num_rows * 4 * layer_.num_units * d_input),
        gemm_workspace_size<scalar_t>(most, 4 * layer_.max_units(), d_input), layer_.acc_options(),
        [&](int64_t task, acc_t* workspace) {
          const Units units = layer_.blocks[task / num_parts];
          const int64_t part = task % num_parts;
          const int64_t begin = part * num_rows / num_parts;
          const int64_t end = (part + 1) * num_rows / num_parts;
          gemm<scalar_t>(end - begin, 4 * units.count, d_input,
                         plain(x_.template const_data_ptr<scalar_t>() + begin * d_input, d_input),
                         transposed(weight_input_.template const_data_ptr<scalar_t>() +
                                        4 * units.first * d_input,
                                    d_input),
                         Write::kReplace, gates() + layer_.gate_place(units, begin), workspace);
        });
  }

  void run_steps() {
    const int64_t width = layer_.width, num_units = layer_.num_units;
    const int64_t most = layer_.num_sentences;
    const int64_t gemm_size =
        whole_lines(std::max(gemm_workspace_size<scalar_t>(most, 4 * layer_.max_units(), width),
                             gemm_workspace_size<scalar_t>(most, width, num_units)));
    const int64_t size = gemm_size + sums_size<scalar_t, acc_t>(most, width) +
                         space_of<scalar_t, acc_t>(most * num_units);
    layer_.for_sentences(size, [&](const Sentences& sentences, acc_t* workspace) {
      acc_t* const gemm_space = take<acc_t>(workspace, gemm_size);
      acc_t* const sums = take<acc_t>(workspace, sums_size<scalar_t, acc_t>(most, width));
      auto* const r_space = take<scalar_t>(workspace, most * num_units);
      for (int64_t step = 0; step < layer_.steps.count(); ++step) {
        const int64_t count = layer_.steps.count_at(step, sentences);
        if (count == 0) break;
        const int64_t row = layer_.steps.row(step, sentences.begin);
        const scalar_t* before = layer_.previous_m(m(), step, sentences.begin);
        const acc_t* previous_c = layer_.previous_c(cells(), step, sentences.begin);
        scalar_t* const m_row = m() + row * width;
        scalar_t* const r = projection_.defined() ? r_space : m_row;
        for (const Units& units : layer_.blocks) {
          acc_t* const z = gates() + layer_.gate_place(units, row);
          if (before != nullptr) {
            const int64_t columns = 4 * units.count;
            gemm<scalar_t>(
                count, columns, width, plain(before, width),
                plain(weight_recurrent_.template const_data_ptr<acc_t>() + 4 * units.first * width,
                      columns),
                Write::kAdd, z, gemm_space);
          }
          vectorized<Cells>(count, units.count, num_units,
                            bias_.template const_data_ptr<acc_t>() + 4 * units.first,
                            previous_c + units.first, z, cells() + row * num_units + units.first,
                            r + units.first);
        }
        if (projection_.defined()) {
          product(count, width, num_units, plain<scalar_t>(r, num_units),
                  plain(projection_.template const_data_ptr<acc_t>(), width), m_row, sums,
                  gemm_space);
        }
      }
    });
  }

  // Copies the outputs from their rows. What has no token is zero.
  void write_outputs() {
    const auto& [m, m_n, c_n, gates, cells] = outputs_;
    const auto& steps = layer_.steps;
    const int64_t width = layer_.width, num_units = layer_.num_units;
    const int64_t num_rows = steps.num_rows(), all = layer_.num_sentences * layer_.num_tokens;
    if (num_rows < all) {
      m.zero_();
      for (const Units& units : layer_.blocks) {
        acc_t* const end = this->gates() + layer_.gate_place(units, all);
        std::fill(this->gates() + layer_.gate_place(units, num_rows), end, acc_t(0));
      }
      std::fill(this->cells() + num_rows * num_units, this->cells() + all * num_units, acc_t(0));
    }
    scatter(num_rows, width, static_cast<const scalar_t*>(this->m()), layer_.of_token(),
            m.template mutable_data_ptr<scalar_t>());
    auto* const last_m = m_n.template mutable_data_ptr<scalar_t>();
    auto* const last_c = c_n.template mutable_data_ptr<scalar_t>();
    for (int64_t i = 0; i < layer_.num_sentences; ++i) {
      const int64_t to = steps.sentences[i];
      const scalar_t* from = layer_.previous_m(this->m(), steps.length(i), i);
      if (from == nullptr) {
        std::fill_n(last_m + to * width, width, scalar_t(0));
      } else {
        std::copy_n(from, width, last_m + to * width);
      }
      vectorized<Convert>(layer_.previous_c(this->cells(), steps.length(i), i), num_units,
                          last_c + to * num_units);
    }
  }

  acc_t* gates() const { return std::get<3>(outputs_).template mutable_data_ptr<acc_t>(); }
  acc_t* cells() const { return std::get<4>(outputs_).template mutable_data_ptr<acc_t>(); }
  scalar_t* m() const { return m_.template mutable_data_ptr<scalar_t>(); }

  const Layer<scalar_t> layer_;
  const LstmOutputs& outputs_;
  const Tensor x_;                 // [rows, D]
  const Tensor weight_input_;      // [4 U, D] in the order of the blocks
  const Tensor weight_recurrent_;  // [P, 4 U] by blocks of columns, in acc_t
  const Tensor bias_;              // [4 U] in the order of the blocks, in acc_t
  const Tensor projection_;        // [U, P] in acc_t, or undefined
  const Tensor m_;                 // [rows, P]
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
    const auto contiguous = [](const OptionalTensor& tensor) {
      return tensor ? tensor->contiguous() : Tensor();
    };
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
    const int64_t most = layer_.num_sentences, units_at_once = layer_.max_units();
    const int64_t gemm_size =
        whole_lines(std::max(gemm_workspace_size<scalar_t>(most, units_at_once, width),
                             gemm_workspace_size<scalar_t>(most, width, 4 * units_at_once)));
    const int64_t size =
        gemm_size + whole_lines(most * units_at_once) + space_of<scalar_t, acc_t>(most * num_units);
    layer_.for_sentences(size, [&](const Sentences& sentences, acc_t* workspace) {
      acc_t* const gemm_space = take<acc_t>(workspace, gemm_size);
      acc_t* const dr_space = take<acc_t>(workspace, most * units_at_once);
      auto* const r_space = take<scalar_t>(workspace, most * num_units);
      for (int64_t step = layer_.steps.count() - 1; step >= 0; --step) {
        const int64_t count = layer_.steps.count_at(step, sentences);
        if (count == 0) continue;
        const int64_t row = layer_.steps.row(step, sentences.begin);
        const acc_t* const dm = grad_m() + row * width;
        acc_t* const dm_before = grad_of_m_before(step, sentences.begin);
        const acc_t* const previous_c = layer_.previous_c(cells(), step, sentences.begin);
        scalar_t* const r = r_.defined() ? this->r() + row * num_units : r_space;
        for (const Units& units : layer_.blocks) {
          const acc_t* dr = dm + units.first;
          int64_t ld_dr = width;
          if (projection_.defined()) {
            gemm<scalar_t>(
                count, units.count, width, plain(dm, width),
                plain(projection_.template const_data_ptr<scalar_t>() + width * units.first,
                      units.count),
                Write::kReplace, dr_space, gemm_space);
            dr = dr_space;
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
              Write::kAdd, dm_before, gemm_space);
        }
      }
    });
  }

  // The products over all rows. A task computes some rows of a gradient in its workspace.
  struct Space {
    acc_t *gemm, *sums;
  };
  using Task = std::function<void(const Space&)>;

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
    const int64_t gemm_size = whole_lines(
        std::max({gemm_workspace_size<scalar_t>(columns, std::max(d_input, width), num_rows()),
                  gemm_workspace_size<scalar_t>(kMaxUnits, num_units, num_rows()),
                  gemm_workspace_size<scalar_t>(rows, d_input, columns)}));
    const int64_t sums =
        std::max({sums_size<scalar_t, acc_t>(columns, std::max(d_input, width)),
                  sums_size<scalar_t, acc_t>(kMaxUnits, num_units), rows * d_input, 2 * columns});
    for_each_task<acc_t>(static_cast<int64_t>(tasks.size()), nullptr,
                         num_threads_for(2 * num_rows() * num_units * (8 * d_input + 4 * width)),
                         gemm_size + sums, layer_.acc_options(),
                         [&](int64_t task, acc_t* workspace) {
                           tasks[task]({.gemm = workspace, .sums = workspace + gemm_size});
                         });
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
        tasks.push_back([=, this](const Space& space) {
          product(units.count, columns, num_rows(), transposed(dz, 4 * units.count),
                  plain(from, columns), to, space.sums, space.gemm);
        });
      }
    }
  }

  // dP = dM^T R
  void add_projection(std::vector<Task>& tasks) const {
    const int64_t width = layer_.width, num_units = layer_.num_units;
    auto* const to = gradients_[kProjection].template mutable_data_ptr<scalar_t>();
    for (int64_t first = 0; first < width; first += kMaxUnits) {
      tasks.push_back([=, this](const Space& space) {
        product(std::min(kMaxUnits, width - first), num_units, num_rows(),
                transposed<acc_t>(grad_m() + first, width), plain<scalar_t>(r(), num_units),
                to + first * num_units, space.sums, space.gemm);
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
      tasks.push_back([=, this](const Space& space) {
        for (const Units& units : layer_.blocks) {
          const int64_t columns = 4 * units.count;
          gemm<scalar_t>(count, d_input, columns,
                         plain<acc_t>(grad_gates() + layer_.gate_place(units, begin), columns),
                         plain(w + 4 * units.first * d_input, d_input),
                         units.first == 0 ? Write::kReplace : Write::kAdd, space.sums, space.gemm);
        }
        for (int64_t r = 0; r < count && layer_.num_units > 0; ++r) {
          vectorized<Convert>(static_cast<const acc_t*>(space.sums + r * d_input), d_input,
                              to + layer_.steps.tokens[begin + r] * d_input);
        }
      });
    }
  }

  void add_bias(std::vector<Task>& tasks) const {
    auto* const to = gradients_[kBias].template mutable_data_ptr<scalar_t>();
    for (const Units& units : layer_.blocks) {
      tasks.push_back([=, this](const Space& space) {
        const int64_t columns = 4 * units.count;
        acc_t *const sum = space.sums, *const group = sum + columns;
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

LstmOutputs lstm_cpu(const Lstm& lstm) {
  constexpr auto op = "lstm";
  check_lstm(op, lstm);
  const LstmOutputs outputs = lstm_outputs(empty, lstm);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, lstm.x.scalar_type(), op,
                                  [&] { LstmForward<scalar_t>(op, lstm, outputs).run(); });
  return outputs;
}

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
  moe_ext::implement<"lstm", &moe_ext::lstm_of<moe_ext::cpu::lstm_cpu>>(m);
  moe_ext::implement<"_lstm_backward", &moe_ext::lstm_backward_of<moe_ext::cpu::lstm_backward_cpu>>(
      m);
}
