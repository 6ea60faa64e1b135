// The slots of a token and the sum of their rows, shared by dispatch, combine and experts.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../routing.h"
#include "parallel.h"

namespace moe_ext::cpu {

// Maps a token to its slots (K slots, or the slots between two offsets) and a slot to its row.
class Slots {
 public:
  // Checks that every row belongs to exactly one slot.
  Slots(const char* op, const Tensor& inverse, const OptionalTensor& token_offsets)
      : row_of_(contiguous_index(inverse)),
        offsets_(token_offsets ? contiguous_index(*token_offsets) : Tensor()),
        k_(token_offsets ? 0 : inverse.size(1)),
        num_tokens_(token_offsets ? token_offsets->numel() - 1 : inverse.size(0)) {
    check_permutation(op, "inverse", row_of_);
    if (token_offsets) {
      check_offsets(op, "token_offsets", offsets_, num_slots());
      bounds_ = offsets_.const_data_ptr<int64_t>();
    }
    rows_ = row_of_.const_data_ptr<int64_t>();
  }

  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_slots() const { return row_of_.numel(); }
  int64_t begin(int64_t token) const { return bounds_ ? bounds_[token] : token * k_; }
  int64_t end(int64_t token) const { return begin(token + 1); }
  int64_t row(int64_t slot) const { return rows_[slot]; }

  // Calls body(first_token, last_token) in parallel; a slot costs `work_per_slot` element accesses.
  template <typename Body>
  void for_tokens(int64_t work_per_slot, const Body& body) const {
    const int64_t slots_per_token = num_slots() / std::max<int64_t>(1, num_tokens_) + 1;
    parallel_for(num_tokens_, slots_per_token * work_per_slot, body);
  }

 private:
  Tensor row_of_;
  Tensor offsets_;
  int64_t k_;
  int64_t num_tokens_;
  const int64_t* bounds_ = nullptr;
  const int64_t* rows_ = nullptr;
};

// sums[t] = sum of weights[s] * rows[slots.row(s)] over the slots s of token t, in order. All
// tensors are contiguous, and weights have the accumulation type of rows. Undefined weights are
// exactly 1.
void sum_of_rows(const Tensor& rows, const Slots& slots, const Tensor& weights, const Tensor& sums);

}  // namespace moe_ext::cpu
