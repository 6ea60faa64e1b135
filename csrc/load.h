// load: the checks of its arguments, and its outputs.
#pragma once

#include <tuple>

#include "checks.h"

namespace moe_ext {

inline void check_load(const char* op, const Tensor& clean_logits, const Tensor& noise_stddev,
                       const Tensor& threshold, const Tensor& expert_index,
                       const OptionalTensor& group_offsets) {
  check_dim(op, "clean_logits", clean_logits, 2);
  check_floating(op, "clean_logits", clean_logits);
  const auto type = accumulate_type(clean_logits);
  const auto num_tokens = clean_logits.sym_size(0);
  check_argument(op, "noise_stddev", noise_stddev, clean_logits, type, clean_logits.sym_sizes());
  check_argument(op, "threshold", threshold, clean_logits, type, {num_tokens, 2});
  check_dim(op, "expert_index", expert_index, 2);
  check_index(op, "expert_index", expert_index, clean_logits,
              {num_tokens, expert_index.sym_size(1)});
  if (group_offsets) check_bounds(op, "group_offsets", *group_offsets, clean_logits, 2);
}

// The shape of load: [E], or [G, E] for G groups of rows.
inline c10::SymDimVector load_shape(const Tensor& clean_logits,
                                    const OptionalTensor& group_offsets) {
  if (!group_offsets) return {clean_logits.sym_size(1)};
  return {group_offsets->sym_size(0) - 1, clean_logits.sym_size(1)};
}

inline Tensor load_output(Empty& empty, const Tensor& clean_logits,
                          const OptionalTensor& group_offsets) {
  return empty(clean_logits, load_shape(clean_logits, group_offsets),
               accumulate_type(clean_logits));
}

inline void check_load_backward(const Tensor& grad_load, const Tensor& clean_logits,
                                const Tensor& noise_stddev, const Tensor& threshold,
                                const Tensor& expert_index, const OptionalTensor& group_offsets) {
  constexpr auto op = "_load_backward";
  check_load(op, clean_logits, noise_stddev, threshold, expert_index, group_offsets);
  check_argument(op, "grad_load", grad_load, clean_logits, accumulate_type(clean_logits),
                 load_shape(clean_logits, group_offsets));
}

inline std::tuple<Tensor, Tensor, Tensor> load_gradients(Empty& empty, const Tensor& clean_logits,
                                                         const Tensor& noise_stddev,
                                                         const Tensor& threshold) {
  return {empty_of(empty, clean_logits), empty_of(empty, noise_stddev), empty_of(empty, threshold)};
}

}  // namespace moe_ext
