// The tokens, the states and the weights of an LSTM in the order in which the CPU reads them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <vector>

#include "../kernels/lstm.h"
#include "../math/integers.h"
#include "arena.h"
#include "block_scheduler.h"
#include "elementwise.h"
#include "gemm/gemm.h"
#include "memory.h"
#include "parallel.h"
#include "vectorize.h"

namespace moe_ext::cpu {

// The most units of a block. A GEMM of a block reads the outputs of a step once.
constexpr int64_t kMaxUnits = 128;

// The fewest sentences of a thread: each thread reads the recurrent weight at each step.
constexpr int64_t kMinSentences = 8;

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
  // Without lengths, each sentence has num_tokens tokens.
  Steps(const int64_t* lengths, int64_t num_sentences, int64_t num_tokens, bool reverse)
      : sentences(num_sentences), lengths_(num_sentences, num_tokens), first_rows_{0} {
    if (lengths != nullptr) std::copy_n(lengths, num_sentences, lengths_.data());
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
    for (int64_t part = 0; part < num_parts; ++part) {
      const int64_t begin = i;
      while (i < num_sentences && num_tokens < part_of(num_rows(), part, num_parts).end) {
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

// to[j, r] = from[row_of(r), j] for `num_rows` rows of `width` numbers, in tiles that fit into the
// first cache level.
template <typename from_t, typename to_t, typename RowOf>
void transpose_rows(int64_t num_rows, int64_t width, const from_t* from, const RowOf& row_of,
                    to_t* to) {
  constexpr int64_t kTile = 32;
  for (int64_t j = 0; j < width; j += kTile) {
    const int64_t end_j = std::min(width, j + kTile);
    for (int64_t r = 0; r < num_rows; r += kTile) {
      const int64_t end_r = std::min(num_rows, r + kTile);
      const from_t* rows[kTile];
      for (int64_t row = r; row < end_r; ++row) rows[row - r] = from + row_of(row) * width;
      for (int64_t c = j; c < end_j; ++c) {
        for (int64_t row = r; row < end_r; ++row) {
          to[c * num_rows + row] = static_cast<to_t>(rows[row - r][c]);
        }
      }
    }
  }
}

// The sizes of an LSTM, its steps, and its weights in the order of the blocks.
template <typename scalar_t>
class Layer {
 public:
  using acc_t = acc_type<scalar_t>;

  explicit Layer(const LstmLayer<scalar_t>& lstm)
      : num_sentences(lstm.num_sentences),
        num_tokens(lstm.num_tokens),
        d_input(lstm.d_input),
        num_units(lstm.num_units),
        width(lstm.width),
        steps(lstm.lengths, num_sentences, num_tokens, lstm.reverse),
        blocks(blocks_of(num_units)),
        c_0(num_sentences * num_units) {
    const auto of_sentence = [&](int64_t i) { return steps.sentences[i]; };
    if (lstm.m_0 != nullptr) {
      m_0 = Array<scalar_t>(num_sentences * width);
      gather(num_sentences, width, lstm.m_0, of_sentence, m_0.data());
    }
    gather(num_sentences, num_units, lstm.c_0, of_sentence, c_0.data());
  }

  // Returns the rows of a matrix [B S, columns] of the batch.
  Array<scalar_t> rows_of(const scalar_t* matrix, int64_t columns) const {
    Array<scalar_t> rows(steps.num_rows() * columns);
    gather(steps.num_rows(), columns, matrix, of_token(), rows.data());
    return rows;
  }

  // Maps a row to its token.
  auto of_token() const {
    return [this](int64_t row) { return steps.tokens[row]; };
  }

  // Returns the rows of a weight [4 U, columns], or the elements of a bias, in the order of the
  // blocks, as numbers of to_t; zeros for null.
  template <typename to_t = scalar_t>
  Array<to_t> in_blocks(const scalar_t* weight, int64_t columns) const {
    Array<to_t> copy(4 * num_units * columns);
    const auto order = rows_in_blocks();
    gather(
        4 * num_units, columns, weight, [&](int64_t row) { return order[row]; }, copy.data());
    return copy;
  }

  // Returns the columns of weight^T [P, 4 U], one block after the other; each is contiguous.
  template <typename to_t>
  Array<to_t> transposed_in_blocks(const scalar_t* weight) const {
    Array<to_t> copy(4 * num_units * width);
    const auto order = rows_in_blocks();
    parallel_for(static_cast<int64_t>(blocks.size()), 4 * kMaxUnits * width,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t b = begin; b < end; ++b) {
                     const auto& [first, count] = blocks[b];
                     const auto row_of = [&](int64_t c) { return order[4 * first + c]; };
                     transpose_rows(4 * count, width, weight, row_of,
                                    copy.data() + 4 * first * width);
                   }
                 });
    return copy;
  }

  // Returns the columns of a projection [P, U], one block after the other; each is contiguous.
  Array<scalar_t> columns_in_blocks(const scalar_t* projection) const {
    Array<scalar_t> copy(width * num_units);
    for (const auto& [first, count] : blocks) {
      for (int64_t row = 0; row < width; ++row) {
        std::copy_n(projection + row * num_units + first, count,
                    copy.data() + width * first + row * count);
      }
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
    return c_0.data() + sentence * num_units;
  }

  // The output before the rows of some sentences at a step; null stands for zeros.
  const scalar_t* previous_m(const scalar_t* m, int64_t step, int64_t sentence) const {
    if (step > 0) return m + steps.row(step - 1, sentence) * width;
    return m_0.data() != nullptr ? m_0.data() + sentence * width : nullptr;
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
  Array<scalar_t> m_0;  // in the order of the steps; no memory stands for zeros
  Array<acc_t> c_0;     // in the order of the steps

 private:
  // Returns the row of a weight for each row in the order of the blocks.
  std::vector<int64_t> rows_in_blocks() const {
    std::vector<int64_t> order(4 * num_units);
    auto next = order.begin();
    for (const auto& [first, count] : blocks) {
      for (int64_t gate = 0; gate < 4; ++gate, next += count) {
        std::iota(next, next + count, gate * num_units + first);
      }
    }
    return order;
  }

  // The blocks have the same number of units, but for the last one.
  static std::vector<Units> blocks_of(int64_t num_units) {
    constexpr int64_t kMultiple = 16;  // of units: the GEMM reads whole vectors
    std::vector<Units> blocks;
    if (num_units == 0) return blocks;
    const int64_t count = round_up(ceil_div(num_units, ceil_div(num_units, kMaxUnits)), kMultiple);
    for (int64_t first = 0; first < num_units; first += count) {
      blocks.push_back({first, std::min(count, num_units - first)});
    }
    return blocks;
  }
};

// The memory of products of at most some sizes.
template <typename scalar_t>
struct ProductWorkspace {
  GemmWorkspace<scalar_t> gemm;
  acc_type<scalar_t>* sums;  // of numbers that are rounded
};

// C = A B, rounded to scalar_t.
template <typename scalar_t, typename a_t, typename b_t>
void product(int64_t m, int64_t n, int64_t k, Operand<a_t> a, Operand<b_t> b, scalar_t* c,
             const ProductWorkspace<scalar_t>& workspace) {
  gemm_rounded<scalar_t>(m, n, k, a, b, Write::kReplace, c, workspace.sums, workspace.gemm);
}

}  // namespace moe_ext::cpu
