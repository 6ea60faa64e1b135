// The tokens, the states and the weights of an LSTM in the order in which the CPU reads them.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <type_traits>
#include <vector>

#include "../lstm.h"
#include "arena.h"
#include "block_scheduler.h"
#include "elementwise.h"
#include "empty_rows.h"
#include "gemm/gemm.h"
#include "parallel.h"
#include "vectorize.h"

namespace moe_ext::cpu {

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
    const Tensor from = contiguous(lstm.c_0);
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

  // Calls body(sentences, workspace) on each thread. A workspace is what take(arena, most) returns
  // for at most `most` sentences.
  template <typename Take, typename Body>
  void for_sentences(const Take& take, const Body& body) const {
    const int64_t useful = std::max<int64_t>(1, num_sentences / kMinSentences);
    const int64_t num_threads =
        std::min(num_threads_for(2 * steps.num_rows() * 4 * num_units * (width + 1)), useful);
    const auto parts = steps.split(num_threads);
    int64_t most = 0;
    for (const auto& [begin, end] : parts) most = std::max(most, end - begin);
    for_each_task(
        num_threads, /*progress=*/nullptr, num_threads,
        [&](Arena& arena) { return take(arena, most); },
        [&](int64_t part, const auto& workspace) { body(parts[part], workspace); });
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

// The memory of products of at most some sizes.
template <typename scalar_t>
struct ProductWorkspace {
  GemmWorkspace<scalar_t> gemm;
  at::opmath_type<scalar_t>* sums;  // of numbers that are rounded
};

// C = A B, rounded to scalar_t, for k of at least 0.
template <typename scalar_t, typename a_t, typename b_t>
void product(int64_t m, int64_t n, int64_t k, Operand<a_t> a, Operand<b_t> b, scalar_t* c,
             const ProductWorkspace<scalar_t>& workspace) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    std::fill_n(c, m * n, scalar_t(0));
  } else if constexpr (std::is_same_v<scalar_t, at::opmath_type<scalar_t>>) {
    gemm<scalar_t>(m, n, k, a, b, Write::kReplace, c, workspace.gemm);
  } else {
    gemm_rounded<scalar_t>(m, n, k, a, b, Write::kReplace, c, workspace.sums, workspace.gemm);
  }
}

// The number of elements of `sums` of a product.
template <typename scalar_t, typename acc_t>
int64_t sums_size(int64_t m, int64_t n) {
  return std::is_same_v<scalar_t, acc_t> ? 0 : rounded_sums_size(m, n);
}

}  // namespace moe_ext::cpu
