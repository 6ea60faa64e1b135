// The GEMMs of CUDA that are not grouped: torch's, or where torch would round float32 to TF32,
// those of a single expert.
#pragma once

#include <ATen/Context.h>
#include <ATen/ops/mm.h>

#include "grouped_gemm.h"
#include "half_mm.h"

namespace moe_ext {

// The GEMMs of a single expert with all rows.
inline GroupedGemms one_group(const Tensor& rows) {
  return GroupedGemms(rows, /*offsets=*/Tensor(), rows.size(0), /*num_experts=*/1);
}

// Returns a [M, K] times b [K, N].
inline Tensor precise_mm(const Tensor& a, const Tensor& b) {
  const at::NoTF32Guard no_tf32;
  if (!rounds_to_tf32(a.scalar_type())) return at::mm(a, b);
  if (a.is_contiguous()) return one_group(a).times(a, in_known_layout(b.unsqueeze(0)));
  const Tensor rows = a.t().contiguous();
  return one_group(rows).weight_gradient(rows, b.contiguous()).squeeze(0);
}

// out = a b
inline void write_mm(Tensor out, const Tensor& a, const Tensor& b) {
  const at::NoTF32Guard no_tf32;
  if (rounds_to_tf32(a.scalar_type())) {
    out.copy_(precise_mm(a, b));
  } else {
    at::mm_out(out, a, b);
  }
}

// Returns a times b in their accumulate_type.
inline Tensor accumulated_mm(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == accumulate_type(a) ? precise_mm(a, b) : half_mm(a, b);
}

// sum += a b
inline void add_mm(Tensor sum, const Tensor& a, const Tensor& b) {
  const at::NoTF32Guard no_tf32;
  if (sum.scalar_type() == a.scalar_type() && !rounds_to_tf32(a.scalar_type())) {
    sum.addmm_(a, b);
  } else {
    sum.add_(accumulated_mm(a, b));
  }
}

}  // namespace moe_ext
