// Slots, rows and offsets: which token goes to which expert.
#pragma once

#include "checks.h"
#include "device.h"
#include "kernels/slots.h"

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

// Contiguous copies of indices, and the slots that read them.
struct SlotTensors {
  // With check_values, which needs tensors on the CPU, every row must belong to exactly one slot.
  SlotTensors(const char* op, const Tensor& inverse, const OptionalTensor& token_offsets,
              bool check_values)
      : row_of(contiguous_index(inverse)),
        bounds(contiguous_index(token_offsets)),
        slots{.row_of = row_of.const_data_ptr<int64_t>(),
              .bounds = data_of<int64_t>(bounds),
              .k = token_offsets ? 0 : inverse.size(1),
              .num_tokens = token_offsets ? token_offsets->numel() - 1 : inverse.size(0),
              .num_slots = inverse.numel()} {
    if (!check_values) return;
    check_permutation(op, "inverse", row_of);
    if (token_offsets) check_offsets(op, "token_offsets", bounds, slots.num_slots);
  }

  Tensor row_of, bounds;
  Slots slots;
};

// Computes sums [T, D] of rows [R, D]; see SumOverSlots. The weights have the accumulation type, or
// are undefined.
template <typename Device>
void sum_over_slots(const Tensor& rows, const Slots& slots, const Tensor& weights,
                    const Tensor& sums) {
  const Tensor source = rows.contiguous(),
               factors = weights.defined() ? weights.contiguous() : weights;
  with_type(rows, [&]<typename scalar_t>() {
    Device::run(SumOverSlots<scalar_t>{.rows = source.const_data_ptr<scalar_t>(),
                                       .weights = data_of<acc_type<scalar_t>>(factors),
                                       .slots = slots,
                                       .width = source.size(1),
                                       .sums = sums.mutable_data_ptr<scalar_t>()});
  });
}

}  // namespace moe_ext
