// Parallel loops on torch's own thread pool, whose results do not depend on the number of threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

#include "vectorize.h"

namespace moe_ext::cpu {

// Calls body(begin, end) on ranges that cover [0, size), each worth at least `kMinWork` when an
// item costs `work_per_item` (in elements touched).
template <typename Body>
void parallel_for(int64_t size, int64_t work_per_item, const Body& body) {
  constexpr int64_t kMinWork = 16384;
  if (size == 0) return;
  isa();  // an error in MOE_EXT_ISA must not first come up in the parallel region
  const int64_t grain = std::max<int64_t>(1, kMinWork / std::max<int64_t>(1, work_per_item));
  torch::stable::parallel_for(0, size, grain, body);
}

// A sum of [num_columns] over tokens: add(begin, end, sum) adds the tokens [begin, end) in order to
// `sum`. Tokens are added in chunks of fixed size and the chunks in their order, whoever computes
// them.
template <typename acc_t, typename Add>
at::Tensor sum_over_tokens(int64_t num_tokens, int64_t num_columns, int64_t work_per_token,
                           const at::TensorOptions& options, const Add& add) {
  constexpr int64_t kChunk = 128;
  const int64_t num_chunks = (num_tokens + kChunk - 1) / kChunk;
  at::Tensor sum = at::zeros({num_columns}, options);
  if (num_chunks == 0) return sum;
  at::Tensor partial = at::zeros({num_chunks, num_columns}, options);
  auto* partial_data = partial.mutable_data_ptr<acc_t>();
  parallel_for(num_chunks, kChunk * work_per_token, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      add(chunk * kChunk, std::min(num_tokens, (chunk + 1) * kChunk),
          partial_data + chunk * num_columns);
    }
  });
  auto* sum_data = sum.mutable_data_ptr<acc_t>();
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    for (int64_t i = 0; i < num_columns; ++i) sum_data[i] += partial_data[chunk * num_columns + i];
  }
  return sum;
}

}  // namespace moe_ext::cpu
