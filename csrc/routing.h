// Slots, rows and offsets: which token goes to which expert.
#pragma once

#include "checks.h"

namespace moe_ext {

// A slot is a (token, expert) assignment. The R slots are ordered by token: those of token t are
// the K from t * K on, or, where their number differs, those from token_offsets[t] to
// token_offsets[t + 1]. A row is the same assignment in the experts' order, and within an expert in
// the slots': inverse leads from slot to row, and expert e has the rows from offsets[e] to
// offsets[e + 1].
struct Routing {
  OptionalTensor offsets;        // [E + 1]; none: every expert has R / E rows
  OptionalTensor inverse;        // [T, K], or [R] with token_offsets; none: the input are the rows
  OptionalTensor token_offsets;  // [T + 1]; none: every token has K slots
  OptionalTensor gates;          // of each slot, in inverse's shape; none: the output are the rows
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
