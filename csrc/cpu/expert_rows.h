// The rows of the experts: their source, and the blocks in which they are computed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "../kernels/experts.h"
#include "block_scheduler.h"
#include "elementwise.h"
#include "slots.h"
#include "vectorize.h"

namespace moe_ext::cpu {

template <typename scalar_t>
class ExpertRows {
 public:
  ExpertRows(const ExpertInput<scalar_t>& input, int64_t width, std::vector<Block> blocks)
      : input_(input), width_(width), blocks_(std::move(blocks)) {
    if (input.slots) {
      const Slots& slots = *input.slots;
      token_of_.resize(slots.num_slots);
      slot_of_.resize(slots.num_slots);
      for_tokens(slots, 1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          for (int64_t slot = slots.begin(t); slot < slots.end(t); ++slot) {
            token_of_[slots.row(slot)] = t;
            slot_of_[slots.row(slot)] = slot;
          }
        }
      });
    }
    int64_t rows_of_expert = 0;
    for (const Block& block : blocks_) {
      rows_of_expert = block.index == 0 ? block.num_rows : rows_of_expert + block.num_rows;
      most_in_block_ = std::max(most_in_block_, block.num_rows);
      most_of_expert_ = std::max(most_of_expert_, rows_of_expert);
    }
  }

  int64_t count() const { return input_.num_rows; }
  int64_t most_in_block() const { return most_in_block_; }
  int64_t most_of_expert() const { return most_of_expert_; }

  const std::vector<Block>& blocks() const { return blocks_; }
  // Returns the next block, or null after the last one.
  const Block* after(const Block& block) const {
    return &block == &blocks_.back() ? nullptr : &block + 1;
  }

  // Whether x holds tokens, not rows.
  bool has_slots() const { return input_.slots.has_value(); }
  int64_t slot_of(int64_t row) const { return slot_of_[row]; }

  // Copies the rows of a block; `data` holds tokens if by_token, else rows.
  template <typename to_t>
  void copy(const Block& block, const scalar_t* data, bool by_token, int64_t width,
            to_t* to) const {
    for (int64_t r = 0; r < block.num_rows; ++r) {
      const int64_t row = block.first_row + r;
      vectorized<Convert>(data + (by_token ? token_of_[row] : row) * width, width, to + r * width);
    }
  }

  // Returns the rows of a block of x; copies them to `space` if x holds tokens.
  const scalar_t* gather(const Block& block, scalar_t* space) const {
    if (!has_slots()) return input_.x + block.first_row * width_;
    copy(block, input_.x, /*by_token=*/true, width_, space);
    return space;
  }

 private:
  const ExpertInput<scalar_t>& input_;
  const int64_t width_;  // of x
  const std::vector<Block> blocks_;
  std::vector<int64_t> token_of_, slot_of_;  // of each row
  int64_t most_in_block_ = 0, most_of_expert_ = 0;
};

}  // namespace moe_ext::cpu
