// Slots, rows and offsets: which token goes to which expert.
#pragma once

#include "checks.h"

namespace moe_ext {

// A slot is a (token, expert) assignment. The R slots are ordered by token. Token t has K slots,
// from slot t * K on. If the number of slots varies, token t has the slots token_offsets[t] <= s <
// token_offsets[t + 1]. Rows are the same assignments, ordered by expert and then by slot. inverse
// maps a slot to its row; expert e has the rows offsets[e] <= r < offsets[e + 1].
struct Routing {
  OptionalTensor offsets;        // [E + 1]; absent: every expert has R / E rows
  OptionalTensor inverse;        // [T, K], or [R] with token_offsets; absent: x holds rows
  OptionalTensor token_offsets;  // [T + 1]; absent: every token has K slots
  OptionalTensor gates;          // one for each slot, shaped like inverse; absent: y holds rows
};

inline c10::SymInt num_tokens_of(const Tensor& inverse, const OptionalTensor& token_offsets) {
  return token_offsets ? token_offsets->sym_size(0) - 1 : inverse.sym_size(0);
}

// Returns the number of tokens.
inline c10::SymInt check_slots(const char* op, const Tensor& inverse,
                               const OptionalTensor& token_offsets, const Tensor& like) {
  check_index(op, "inverse", inverse, like);
  check_dim(op, "inverse", inverse, token_offsets ? 1 : 2);
  if (token_offsets) check_bounds(op, "token_offsets", *token_offsets, like, 1);
  return num_tokens_of(inverse, token_offsets);
}

}  // namespace moe_ext
