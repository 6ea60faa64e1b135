// The slots of tokens, the copies of their rows and the sums of their rows; see routing.h.
#pragma once

#include "../math/elementary.h"
#include "types.h"

namespace moe_ext {

// Maps a token to its slots (K slots, or the slots between two offsets) and a slot to its row.
struct Slots {
  const int64_t* row_of;  // of each slot
  const int64_t* bounds;  // [T + 1], or null: K slots each
  int64_t k;
  int64_t num_tokens;
  int64_t num_slots;

  MOE_EXT_INLINE int64_t begin(int64_t token) const { return bounds ? bounds[token] : token * k; }
  MOE_EXT_INLINE int64_t end(int64_t token) const { return begin(token + 1); }
  MOE_EXT_INLINE int64_t row(int64_t slot) const { return row_of[slot]; }
};

// rows[slots.row(s)] = x[t] for the slots s of token t.
template <typename scalar_t>
struct RowsOfSlots {
  const scalar_t* x;  // [T, width]
  Slots slots;
  int64_t width;
  scalar_t* rows;  // [R, width]

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CPU(RowsOfSlots)
MOE_EXT_RUNS_ON_CUDA(RowsOfSlots)

// sums[t] = sum of weights[s] * rows[slots.row(s)] over the slots s of token t, in order.
template <typename scalar_t>
struct SumOverSlots {
  const scalar_t* rows;               // [R, width]
  const acc_type<scalar_t>* weights;  // [R], or null: exactly 1
  Slots slots;
  int64_t width;
  scalar_t* sums;  // [T, width]

  void on_cpu() const;
  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CPU(SumOverSlots)
MOE_EXT_RUNS_ON_CUDA(SumOverSlots)

}  // namespace moe_ext
